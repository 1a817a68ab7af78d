"""Responses of many steps whose worker is killed: they go on elsewhere from a step that was done, and no other way."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from apis.deltas import estimate_tokens
from tests.support.laws.stream_laws import check_frames
from tests.support.servers.serving import serving
from tests.support.servers.worker_processes import Workers, check_log, worker_processes

SEARCH: list[dict[str, Any]] = [{"type": "web_search"}]
POINTS: Mapping[str, tuple[str, int]] = {
    "search": ("response.web_search_call.searching", 1),
    "meet": ("response.web_search_call.completed", 1),
    "wait": ("response.web_search_call.completed", 1),
    "tell": ("response.output_text.delta", 20),
}
"""The event, and its number, that each response has sent when its worker is killed."""
LAZY = {"provider": "loop", "background": {"lease_s": 1.5, "poll_s": 10}}
WHOLE = "found " * 20 + "it"
Json = dict[str, Any]


@asynccontextmanager
async def elsewhere(store: Json) -> AsyncGenerator[Workers]:
    """Another worker, which finds at once."""
    model, tool = (
        {"provider": "tests.support.servers.stepping_provider:Stepping"},
        {"provider": "tests.support.servers.stepping_provider:Search"},
    )
    background = {"background": {"lease_s": 1.5, "poll_s": 0.1}}
    async with serving(model, tool_runtime=tool, kv_store=store, responses=background) as served:
        yield Workers(served.url, psutil.Process())


def outline(response: Json) -> list[tuple[str, str]]:
    return [(item["type"], item["status"]) for item in response["output"]]


async def begin(workers: Workers, text: str, **fields: Any) -> str:
    response_id = await workers.begin(text, tools=SEARCH, **fields)
    assert response_id is not None
    return response_id


async def items(workers: Workers, conversation: str) -> list[Json]:
    return (await workers.ask("GET", f"/conversations/{conversation}/items?order=asc")).json()["data"]


def text(response: Json) -> str:
    return "".join(part["text"] for item in response["output"][-1:] for part in item.get("content", ()))


async def test_what_was_done_is_kept_and_gone_on_from(shared_store: Json, tmp_path: Path) -> None:
    async with (
        elsewhere(shared_store) as other,
        worker_processes(tmp_path, shared_store, workers=1, slow_s=30, more={"responses": LAZY}) as dying,
    ):
        conversation = (await other.ask("POST", "/conversations", json={})).json()["id"]
        ids = {name: await begin(dying, name) for name in POINTS if name != "search"}
        ids["search"] = await begin(dying, "search", conversation=conversation)
        outcomes = await asyncio.gather(*(other.until(ids[name], *point) for name, point in POINTS.items()))
        dying.parent.kill()
        ended = {name: await other.ended(each, 20) for name, each in ids.items()}
        logs = {name: await other.log(each) for name, each in ids.items()}
        turn = await items(other, conversation)

    for name, response in ended.items():
        check_log(logs[name], response)
    for name, before in zip(POINTS, outcomes, strict=True):
        assert logs[name].startswith(before)
    searched, thought, message = ("web_search_call", "completed"), ("reasoning", "completed"), ("message", "completed")
    lost = ("web_search_call", "failed")
    assert outline(ended["search"]) == [thought, lost, searched, searched, message]
    assert outline(ended["meet"]) == [searched, lost, message]
    assert outline(ended["wait"]) == [searched, message]
    assert [text(ended[name]) for name in ("search", "meet", "wait")] == [WHOLE, WHOLE, WHOLE[:-2]]
    assert [item["id"] for item in turn][1:] == [item["id"] for item in ended["search"]["output"]]

    failed = ended["tell"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "stopped before it was done" in failed["error"]["message"]
    assert outline(failed) == [searched, ("message", "incomplete")]
    deltas = [event for event in check_frames(logs["tell"]) if event["type"] == "response.output_text.delta"]
    chars = sum(len(event["delta"]) for event in deltas)
    assert failed["usage"]["output_tokens"] == 2 + estimate_tokens(len(deltas), chars)
    sequence = [event["sequence_number"] for event in check_frames(logs["search"])]
    assert sequence == [*range(len(sequence))]
