"""Data of the first edition: a store that it wrote is served by this one, through the official SDK.

`tests/support/data/first_edition` holds the SQLite files of the store and of the vector index, with all expiries set to
the year 2100, and as `manifest.json` the objects that the first edition returned for them.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from tests.support.sdk.conversations import conversations, texts, user
from tests.support.sdk.file_search_stack import filing
from tests.support.sdk.requests import create, messages, responses
from tests.support.servers.serving import Served

DATA = Path(__file__).parent.parent / "support" / "data" / "first_edition"
MANIFEST: dict[str, Any] = json.loads((DATA / "manifest.json").read_text())
INCLUDE = ["file_search_call.results", "code_interpreter_call.outputs", "web_search_call.action.sources"]
"""Stored parts of items that only a request which names them sees."""
INTERRUPTED = "resp_b404744421a1c7ca2b1a45f3bdcb1660"
"""A background response that had begun when the process stopped."""
TOOLS = [{"type": "function", "name": name} for name in ("get", "file_search")]


@asynccontextmanager
async def upgraded(folder: Path, *turns: Any) -> AsyncGenerator[Served]:
    """A stack over a copy of the data, after its worker has executed the two runs that the first edition left."""
    store = {"provider": "sqlite", "path": str(shutil.copy(DATA / "responses.sqlite", folder / "responses.db"))}
    shutil.copy(DATA / "vectors.sqlite", folder / "vectors.db")
    async with filing(folder, [{"text": "from the queue"}], *turns, kv_store=store) as served, asyncio.timeout(30):
        for response_id in (MANIFEST["queued"], INTERRUPTED):
            while (await responses(served).retrieve(response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110 - a response sets no event
                await asyncio.sleep(0.02)
        yield served


def plain(value: Any) -> Any:
    """The JSON of an SDK object or of the manifest without null fields, which later SDKs may add."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json", warnings=False))
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {key: plain(field) for key, field in fields.items() if field is not None}
    return [plain(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


async def listed(pages: Any) -> list[Any]:
    return [plain(item) async for item in pages]


async def test_responses_and_their_input_items_are_as_the_first_edition_returned_them(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        for response_id, expected in MANIFEST["responses"].items():
            assert plain(await responses(served).retrieve(response_id, include=INCLUDE)) == plain(expected["response"])
            items = await responses(served).input_items.list(response_id, limit=100, include=INCLUDE)
            assert plain(items.data) == plain(expected["input_items"])


async def test_a_chain_continues_and_forks(tmp_path: Path) -> None:
    async with upgraded(tmp_path, [{"text": "A5"}], [{"text": "A6"}], [{"text": "fork"}]) as served:
        response = await create(served, input="Q5", previous_response_id=MANIFEST["chain"])
        chain = [message.get("content") for message in messages(served)]
        assert [text for text in chain if text] == ["Q1", "A1", "Q2", "A2", "Q3", "42", "Done.", "Q5"]
        assert response.output_text == "A5"
        await create(served, input="Q6", previous_response_id=response.id)
        assert messages(served)[-2]["content"] == "A5"
        await create(served, input="Qf", previous_response_id=MANIFEST["chain"])
        assert [message.get("content") for message in messages(served)[-2:]] == ["Done.", "Qf"]


async def test_a_hosted_tools_result_is_replayed_to_the_model(tmp_path: Path) -> None:
    async with upgraded(tmp_path, [{"text": "Yes."}]) as served:
        await create(served, input="Sure?", previous_response_id=MANIFEST["search"])
        assert "It eats krill." in json.dumps(messages(served), ensure_ascii=False)


async def test_deleted_responses_leave_nothing_in_the_store(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        for response_id in (*MANIFEST["responses"], MANIFEST["queued"], INTERRUPTED):
            await responses(served).delete(response_id)
        kinds = {key.split("/")[1] for key, _ in await served.stack.kv_store.scan("default/")}
        assert kinds.isdisjoint({"response", "turn", "item", "branch", "event", "step", "request"})


async def test_a_conversation_lists_its_items_and_takes_a_turn(tmp_path: Path) -> None:
    async with upgraded(tmp_path, [{"text": "C2"}]) as served:
        conversation_id = MANIFEST["conversation"]["id"]
        assert plain(await conversations(served).retrieve(conversation_id)) == plain(MANIFEST["conversation"])
        items = await listed(conversations(served).items.list(conversation_id, order="asc"))
        assert items == plain(MANIFEST["conversation_items"])
        await create(served, input="Q2", conversation=conversation_id)
        assert await texts(served, conversation_id) == ["Q0", "Q1", "C1", "Q2", "C2"]
        for item in MANIFEST["conversation_items"]:
            await conversations(served).items.delete(item["id"], conversation_id=conversation_id)
        assert await texts(served, conversation_id) == ["Q2", "C2"]


async def test_an_idempotency_key_answers_with_the_first_editions_response(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        response = await create(served, input="Qi", tools=TOOLS, extra_headers={"Idempotency-Key": "old-key"})
        assert plain(response) == plain(MANIFEST["responses"][MANIFEST["idempotent"]]["response"])


async def test_sealed_reasoning_and_compactions_are_opened_for_the_model(tmp_path: Path) -> None:
    async with upgraded(tmp_path, [{"text": "E2"}], [{"text": "after"}]) as served:
        await create(served, input=[user("Qe"), *MANIFEST["sealed_output"], user("and?")], store=False)
        assert "secret" in json.dumps(messages(served))
        compacted = [*MANIFEST["compacted"], user("and?")]
        await create(served, input=compacted, store=False)
        assert "a summary of it all" in json.dumps(messages(served))


async def test_files_and_vector_stores_are_listed_read_and_searched(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        client: Any = served.client
        [store] = MANIFEST["vector_stores"]
        assert await listed(client.files.list()) == plain(MANIFEST["files"])
        assert await listed(client.vector_stores.list()) == plain(MANIFEST["vector_stores"])
        assert await listed(client.vector_stores.files.list(store["id"])) == plain(MANIFEST["vector_store_files"])
        for file in MANIFEST["files"]:
            content = (await client.files.content(file["id"])).content
            assert len(content) == file["bytes"]
            extracted = await client.vector_stores.files.content(file["id"], vector_store_id=store["id"])
            assert "".join(part.text for part in extracted.data) == content.decode()
        hits = await client.vector_stores.search(store["id"], query="whales krill")
        assert hits.data[0].filename == "whales.md"


async def test_a_queued_background_response_is_executed_and_an_interrupted_one_has_failed(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        queued = await responses(served).retrieve(MANIFEST["queued"])
        assert (queued.status, queued.output_text) == ("completed", "from the queue")
        events = [event async for event in await responses(served).retrieve(MANIFEST["queued"], stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        interrupted = await responses(served).retrieve(INTERRUPTED)
        assert (interrupted.status, interrupted.output_text) == ("failed", "slow ")


async def test_the_event_log_of_a_background_response_is_streamed_again(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as served:
        events = [event async for event in await responses(served).retrieve(MANIFEST["background"], stream=True)]
        assert events[0].type == "response.created"
        assert plain(events[-1].response) == plain(MANIFEST["responses"][MANIFEST["background"]]["response"])
