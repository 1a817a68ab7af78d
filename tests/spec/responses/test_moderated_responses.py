"""Responses with `moderation`: scores of input and output, and flagged content that reaches no client and no store."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from openai import BadRequestError, InternalServerError
from openai.types.responses import Response

from apis.storage.kv_store import KVStore
from tests.support.models.word_judge import HIGH, LOW, WordJudge
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import create, refusal, stream
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until_ended

Json = dict[str, Any]
NAME = "omni-moderation-latest"
SCORE: Json = {"model": NAME}
BLOCK: Json = {"model": NAME, "policy": {"input": {"mode": "block"}, "output": {"mode": "block"}}}
CLEAN = "A flower stands in a field of grass. "
FLAGGED = "Now kill the secret-word gardener. "


@asynccontextmanager
async def moderating(*turns: Script, more: Json | None = None, **sections: Any) -> AsyncGenerator[Served]:
    """A stack whose model plays these turns, and judges by words."""
    inference = {"provider": "tests.support.models.word_judge:WordJudge", "turns": [*turns]}
    moderation = {"provider": "predicates", "model": "scripted", "window_chars": 40}
    async with serving(inference, more={"moderation": moderation, **(more or {})}, **sections) as served:
        yield served


def judge_of(served: Served) -> WordJudge:
    return cast(WordJudge, served.stack.inference)


def said(*texts: str) -> Script:
    return [{"text": [*texts]}]


async def stored_bytes(served: Served) -> bytes:
    """Everything that the store holds."""
    kv: KVStore = served.stack.kv_store
    return b"\n".join([value async for values in _scan(kv) for value in values])


async def _scan(kv: KVStore) -> AsyncGenerator[list[bytes]]:
    after = ""
    while True:
        page = await kv.scan("", after=after, limit=500)
        if not page:
            return
        yield [bytes(entry.value) for _, entry in page]
        after = page[-1][0]


async def test_input_and_output_are_scored() -> None:
    async with moderating(said(CLEAN, FLAGGED)) as served:
        response: Response = await create(served, input="You scum", moderation=SCORE)
        retrieved = await served.client.responses.retrieve(response.id)
    assert response.status == "completed"
    assert response.output_text == CLEAN + FLAGGED, "scores change nothing"
    assert response.moderation is not None
    report: Any = response.moderation
    assert (report.input.type, report.input.flagged, report.input.model) == ("moderation_result", True, "scripted")
    assert (report.input.category_scores["hate"], report.input.category_scores["violence"]) == (HIGH, LOW)
    assert (report.output.flagged, report.output.categories["violence"]) == (True, True)
    assert retrieved.moderation == response.moderation
    assert Response.model_validate(response.to_dict()).moderation == response.moderation


async def test_without_the_field_nothing_is_judged() -> None:
    async with moderating(said(FLAGGED)) as served:
        response = await create(served, input="scum")
        assert not judge_of(served).judged
    assert response.moderation is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_flagged_input_reaches_no_model_and_no_store(streamed: bool) -> None:
    async with moderating(said(CLEAN)) as served:
        items: Any = [{"role": "user", "content": "You scum"}]
        for said_by_user in ("You scum", items):
            error = await refusal(served, moderation=BLOCK, input=said_by_user)
            assert (error["param"], error["code"]) == ("input", "moderation_blocked")
            assert "scum" not in error["message"]
        with pytest.raises(BadRequestError):
            await create(served, input="You scum", moderation=BLOCK, background=True)
        assert not judge_of(served).requests
        assert b"scum" not in await stored_bytes(served)
        response = await create(served, input="You flower", moderation=BLOCK, stream=False)
        assert response.output_text == CLEAN


async def test_flagged_input_that_steers_a_response_is_not_kept() -> None:
    """It waits in a mailbox, and the response that is to read it fails."""
    async with moderating([*said(CLEAN * 3), {"wait_s": 0.5}, {"text": "done"}]) as served:
        first = await create(served, input="Go", moderation=BLOCK, background=True)
        async with sdk_client(served.url) as client, client.responses.connect() as connection:
            await connection.response.steer(previous_response_id=first.id, input="You scum")
            accepted: Any = await connection.recv()
        next_id = f"resp_{accepted.steer.id.removeprefix('steer_')[:44]}"
        assert (await until_ended(served.client.responses, first.id)).status == "completed"
        blocked = await until_ended(served.client.responses, next_id)
        assert blocked.status == "failed"
        assert "blocked by moderation" in blocked.error.message
        assert (await served.client.responses.input_items.list(next_id)).data == []
        assert b"scum" not in await stored_bytes(served)
        assert "scum" not in str([request.messages for request in judge_of(served).requests])


async def test_flagged_output_of_a_client_s_function_is_input() -> None:
    called: Json = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output: Json = {"type": "function_call_output", "call_id": "c1", "output": "They are scum"}
    async with moderating(said(CLEAN)) as served:
        error = await refusal(served, input=[{"role": "user", "content": "Read."}, called, output], moderation=BLOCK)
    assert error["code"] == "moderation_blocked"


@pytest.mark.parametrize("background", [False, True])
async def test_flagged_output_leaves_nowhere(background: bool) -> None:
    turn = said(*[f"{word} " for word in (CLEAN * 3 + FLAGGED + CLEAN).split()])
    async with moderating(turn) as served:
        events = await stream(served, moderation=BLOCK, background=background)
        response = events[-1].response
        retrieved = await served.client.responses.retrieve(response.id)
        stored = await stored_bytes(served)
        assert judge_of(served).abandoned_chats == 1, "the model was stopped"
    assert b"flower" in stored
    assert events[-1].type == "response.incomplete"
    assert response.incomplete_details.reason == "content_filter"
    assert response.output_text.startswith(CLEAN)
    for text in (
        json.dumps([event.to_dict() for event in events]),
        retrieved.to_json(),
        stored.decode("utf-8", "replace"),
    ):
        assert "kill" not in text
        assert "secret-word" not in text
    assert response.moderation.output.flagged
    assert not response.moderation.input.flagged
    assert response.usage.output_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert retrieved.output_text == response.output_text


async def test_clean_output_leaves_whole_in_windows() -> None:
    words = [f"{word} " for word in (CLEAN * 5).split()]
    async with moderating(said(*words)) as served:
        events = await stream(served, moderation=BLOCK)
        windows = [request.input[0].model_dump()["text"] for request in judge_of(served).judged[1:]]
    assert events[-1].response.status == "completed"
    assert events[-1].response.output_text == "".join(words)
    assert len(windows) > 3
    assert all(len(window) < 40 + 20 + 20 for window in windows), "a window, half a window before it, and a word"
    assert not events[-1].response.moderation.output.flagged


async def test_a_word_on_the_edge_of_two_windows_is_found() -> None:
    for edge in range(30, 50):
        async with moderating(said("x" * edge, "ki", "ll", " on and on")) as served:
            response = await create(served, moderation=BLOCK)
            assert response.status == "incomplete", edge


async def test_reasoning_and_arguments_are_judged_too() -> None:
    thought: Script = [{"reasoning": "They are scum. "}, {"text": CLEAN}]
    calling: Script = [call("act", '{"how": "kill them all"}')]
    tools: Json = {"tools": [{"type": "function", "name": "act", "parameters": {"type": "object"}}]}
    async with moderating(thought, calling) as served:
        for fields in ({}, tools):
            events = await stream(served, moderation=BLOCK, **fields)
            assert events[-1].response.incomplete_details.reason == "content_filter"
            text = json.dumps([event.to_dict() for event in events])
            assert "scum" not in text
            assert "kill" not in text
            assert all(item.status != "completed" for item in events[-1].response.output)


async def test_escaped_letters_of_arguments_are_read_as_their_receiver_reads_them() -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in "kill")
    tools: Json = {"tools": [{"type": "function", "name": "act", "parameters": {"type": "object"}}]}
    for edge in range(12, 20):
        text = f'{{"how": "{"x" * edge} {escaped} them all"}}'
        async with moderating([call("act", *text)]) as served:
            response = await create(served, moderation=BLOCK, **tools)
            assert response.status == "incomplete", edge


async def test_a_turn_after_a_tool_is_judged_by_itself() -> None:
    async with moderating(said(CLEAN), said(FLAGGED)) as served:
        first = await create(served, moderation=BLOCK)
        second = await create(served, moderation=BLOCK, input="Go on.", previous_response_id=first.id)
        assert (first.status, second.status) == ("completed", "incomplete")
        items = await served.client.responses.input_items.list(second.id)
    assert "kill" not in items.to_json()


async def test_a_moderation_that_fails_blocks_or_says_so() -> None:
    async with moderating(said(CLEAN, CLEAN, "It is broken, the vase. ", CLEAN)) as served:
        response = await create(served, moderation=SCORE)
        assert response.status == "completed"
        assert (response.moderation.input.type, response.moderation.output.type) == ("moderation_result", "error")
        assert response.moderation.output.message == "The judge is broken."
        with pytest.raises(InternalServerError, match="could not be moderated"):
            await create(served, moderation=BLOCK)
        events = [event async for event in await create(served, moderation=BLOCK, stream=True)]
        assert events[-1].type == "response.failed"
        assert "vase" not in json.dumps([event.to_dict() for event in events])
        with pytest.raises(InternalServerError, match="judge is broken"):
            await create(served, input="broken", moderation=BLOCK)
        scored = await create(served, input="broken", moderation=SCORE)
        assert scored.moderation.input.type == "error"


REFUSED: dict[str, tuple[Json, str]] = {
    "another model": ({"model": "guard"}, "moderation.model"),
    "no model": ({}, "moderation.model"),
    "a mode": ({"model": NAME, "policy": {"output": {"mode": "warn"}}}, "moderation.policy.output.mode"),
    "no mode": ({"model": NAME, "policy": {"input": {}}}, "moderation.policy.input.mode"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_a_missing_moderation_is_refused_by_its_field(case: tuple[Json, str]) -> None:
    moderation, param = case
    async with moderating() as served:
        assert (await refusal(served, moderation=moderation))["param"] == param
        assert not judge_of(served).requests


async def test_without_a_moderation_the_field_says_what_is_missing() -> None:
    async with serving() as served:
        error = await refusal(served, moderation=SCORE)
    assert (error["param"], error["code"]) == ("moderation", "not_configured")


async def test_tokens_are_counted_without_a_judgement() -> None:
    async with moderating() as served:
        counted = await served.client.responses.input_tokens.count(model="scripted", input="You scum")
        assert counted.input_tokens > 0
        assert not judge_of(served).judged
