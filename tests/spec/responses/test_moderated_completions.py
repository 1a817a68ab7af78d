"""Chat completions with `moderation`, and what the judging of requests counts as."""

import time
from typing import Any

import pytest
from openai import BadRequestError

from tests.spec.responses.test_chat_completions import chunks, complete, joined
from tests.spec.responses.test_moderated_responses import BLOCK, CLEAN, FLAGGED, SCORE, judge_of, moderating, said
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, usage_results

SCUM: Any = [
    {"role": "system", "content": "kill"},
    {"role": "user", "content": [{"type": "text", "text": "You scum"}]},
]


async def test_input_and_output_are_scored() -> None:
    async with moderating(said(CLEAN, FLAGGED)) as served:
        whole = await complete(served, messages=SCUM, moderation=SCORE)
        *first, moderated, usage = await chunks(
            served, messages=SCUM, moderation=SCORE, stream_options={"include_usage": True}
        )
        plain = await complete(served, messages=SCUM)
    assert whole.choices[0].message.content == CLEAN + FLAGGED
    assert (joined(first), first[-1].choices[0].finish_reason) == (CLEAN + FLAGGED, "stop")
    assert (moderated.choices, usage.moderation) == ([], None)
    for report in (whole.moderation, moderated.moderation):
        assert (report.input.type, report.input.model) == ("moderation_results", "scripted")
        (of_input,), (of_output,) = report.input.results, report.output.results
        assert (of_input.categories["hate"], of_input.categories["violence"]) == (True, False)
        assert (of_output.categories["hate"], of_output.categories["violence"]) == (False, True)
    assert plain.moderation is None


async def test_flagged_input_reaches_no_model() -> None:
    output: Any = {"role": "tool", "tool_call_id": "c1", "content": "They are scum"}
    called: Any = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    asked: Any = [{"role": "user", "content": "Read."}, {"role": "assistant", "tool_calls": [called]}, output]
    async with moderating(said(CLEAN)) as served:
        for messages in (SCUM, asked):
            with pytest.raises(BadRequestError) as caught:
                await complete(served, messages=messages, moderation=BLOCK)
            assert (caught.value.code, caught.value.param) == ("moderation_blocked", "messages")
        assert not judge_of(served).requests


async def test_flagged_output_leaves_nowhere() -> None:
    words = [f"{word} " for word in (CLEAN * 3 + FLAGGED + CLEAN).split()]
    async with moderating(said(*words)) as served:
        received = await chunks(served, moderation=BLOCK)
        whole = await complete(served, moderation=BLOCK)
    (choice,) = whole.choices
    assert received[-2].choices[0].finish_reason == choice.finish_reason == "content_filter"
    for text, report in ((joined(received), received[-1].moderation), (choice.message.content, whole.moderation)):
        assert text.startswith(CLEAN)
        assert "kill" not in text
        assert report.output.results[0].flagged


async def test_a_moderation_that_is_not_there_is_refused_by_its_field() -> None:
    for stack, moderation, param in (
        (moderating(), {"model": "guard"}, "moderation.model"),
        (serving(), SCORE, "moderation"),
    ):
        async with stack as served:
            with pytest.raises(BadRequestError) as caught:
                await complete(served, moderation=moderation)
            assert caught.value.param == param


@pytest.mark.parametrize("how", ["response", "background", "blocked", "completion"])
async def test_what_judging_has_used_is_counted_as_moderations(how: str) -> None:
    sections: Any = {"more": CHAINED, "server": {"api_keys": [ROOT]}}
    async with moderating(said("four"), **sections) as served:
        organization = organization_of(served.client)
        project, key = await new_project(organization)
        async with sdk_client(served.url, key) as client:
            request: Any = {"model": "scripted", "moderation": SCORE}
            responses: Any = client.responses
            if how == "completion":
                await client.chat.completions.create(**request, messages=[{"role": "user", "content": "seven"}])
            elif how == "blocked":
                with pytest.raises(BadRequestError):
                    await responses.create(model="scripted", input="scum", moderation=BLOCK)
            else:
                created = await responses.create(**request, input="seven", background=how == "background")
                while created.status in ("queued", "in_progress"):
                    created = await responses.retrieve(created.id)
        since = int(time.time()) // 86_400 * 86_400
        (result,) = usage_results(await organization.usage.moderations(start_time=since, project_ids=[project]))
    counted = (result.num_model_requests, result.input_tokens)
    assert counted == ((1, len("scum")) if how == "blocked" else (2, len("seven") + len("four")))
