"""Conversations that are compacted: by asking for it, and by themselves when they grow too long."""

from typing import Any

import aiohttp
import pytest
from openai import BadRequestError, InternalServerError, NotFoundError

from providers.inference.scripted import count_words
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.conversations import conversations
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.sdk.web_pages import browsing
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

Json = dict[str, Any]
SUMMED: Script = [{"reasoning": "hm"}, {"text": ["They met ", "Ada in Rome."]}]
ANSWER: Script = [{"text": "Yes."}]
LONG = " ".join(["word"] * 60)
SMALL: Json = {"context_management": [{"type": "compaction", "compact_threshold": 40}]}
TALK: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Who is that?"},
    {"role": "assistant", "content": "Ada, in Rome."},
    {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "It rains."},
    {"role": "user", "content": [{"type": "input_text", "text": "And where?"}]},
]


def said(served: Served) -> list[tuple[str, str]]:
    """Who said what to the model last, the words of a summary without what introduces them."""
    return [(each["role"], str(each.get("content", "")).split("\n\n")[-1]) for each in messages(served)]


async def compact(served: Served, **fields: Any) -> Any:
    return await responses(served).compact(**{"model": "scripted", "input": TALK, **fields})


def of_type(response: Any, kind: str = "compaction") -> Any:
    (item,) = (item for item in response.output if item.type == kind)
    return item


# --- by asking for it -------------------------------------------------------------------------------------------------


async def test_what_the_user_said_stays_and_the_rest_is_one_item() -> None:
    async with serving(scripted(SUMMED)) as served:
        compacted = await compact(served, instructions="Mind the weather.")
        (chat,) = chat_requests(served)
    assert compacted.object == "response.compaction"
    assert compacted.id.startswith("resp_")
    *users, item = [bare(each) for each in compacted.output]
    assert [(each["type"], each["role"], each["status"]) for each in users] == [("message", "user", "completed")] * 2
    assert [each["content"][0]["text"] for each in users] == ["Who is that?", "And where?"]
    assert users[0]["content"][0]["type"] == "input_text"
    assert item["type"] == "compaction"
    assert item["id"].startswith("cmp_")
    assert "Ada" not in item["encrypted_content"]
    assert len({each["id"] for each in (*users, item)}) == 3
    assert compacted.usage.output_tokens == 3
    assert compacted.usage.output_tokens_details.reasoning_tokens == 1
    assert compacted.usage.total_tokens == compacted.usage.input_tokens + 3
    assert chat.messages[0].content == "Mind the weather."
    assert [each.role for each in chat.messages[1:]] == ["developer", "user", "assistant", "tool", "user", "user"]
    assert chat.tools is None


async def test_what_was_compacted_is_a_beginning() -> None:
    async with serving(scripted(SUMMED, ANSWER)) as served:
        compacted = await compact(served)
        output = [bare(item) for item in compacted.output]
        response = await create(served, input=[*output, {"role": "user", "content": "Why?"}], store=False)
        sent_messages = said(served)
        count = await responses(served).input_tokens.count(model="scripted", input=output)
        chat = chat_requests(served)[-1]
    assert response.output_text == "Yes."
    assert response.input_transformations is None
    assert sent_messages == [
        ("developer", "Be brief."),
        ("user", "Who is that?"),
        ("user", "And where?"),
        ("user", "They met Ada in Rome."),
        ("user", "Why?"),
    ]
    assert count.input_tokens < sum(len(str(each.content).split()) for each in chat.messages) + 10


async def test_a_chain_is_compacted_and_goes_on_after_it() -> None:
    async with serving(scripted(ANSWER, SUMMED, ANSWER)) as served:
        first = await create(served, input="one")
        compacted = await compact(served, input=None, previous_response_id=first.id)
        second = await create(served, input=[bare(item) for item in compacted.output])
        await create(served, input="three", previous_response_id=second.id)
        sent_messages = said(served)
        listed = await responses(served).input_items.list(second.id, order="asc")
    assert sent_messages == [
        ("user", "one"),
        ("user", "They met Ada in Rome."),
        ("assistant", "Yes."),
        ("user", "three"),
    ]
    assert [item.type for item in listed.data] == ["message", "compaction"]
    assert bare(listed.data[1]) == bare(compacted.output[1])


async def test_a_compaction_is_compacted_with_what_came_after() -> None:
    async with serving(scripted(SUMMED, [{"text": "All of it."}], ANSWER)) as served:
        first = [bare(item) for item in (await compact(served)).output]
        more = [{"role": "assistant", "content": "So?"}, {"role": "user", "content": "Go on."}]
        second = [bare(item) for item in (await compact(served, input=[*first, *more])).output]
        before = said(served)
        await create(served, input=second)
        sent_messages = said(served)
    assert ("user", "They met Ada in Rome.") in before
    assert [item["type"] for item in second] == ["message", "message", "message", "compaction"]
    assert sent_messages == [
        ("developer", "Be brief."),
        ("user", "Who is that?"),
        ("user", "And where?"),
        ("user", "Go on."),
        ("user", "All of it."),
    ]


async def test_another_model_may_go_on_from_it() -> None:
    providers = {
        "one": scripted(SUMMED, model="one"),
        "two": scripted(ANSWER, model="two"),
    }
    async with serving({"provider": "router", "providers": providers}) as served:
        compacted = await compact(served, model="one")
        response = await create(served, model="two", input=[bare(item) for item in compacted.output])
    assert response.output_text == "Yes."
    assert response.input_transformations is None


@pytest.mark.parametrize("token", ["gAAAAABfromElsewhere", "rs3.AAAA"])
@pytest.mark.parametrize("position", [0, 1, len(TALK)])
async def test_a_compaction_that_cannot_be_opened_is_refused_at_any_position(position: int, token: str) -> None:
    """The answer would be about a conversation of which a part is not known."""
    item = {"type": "compaction", "id": "cmp_theirs", "encrypted_content": token}
    async with serving(scripted([{"text": "Hi."}], SUMMED, ANSWER)) as served:
        input_items = [*TALK[:position], item, *TALK[position:]]
        for tail in ([], [{"type": "compaction_trigger"}]):
            error = await refusal(served, input=[*input_items, *tail])
            assert error["param"] == f"input[{position}].encrypted_content"
            assert error["code"] == "invalid_encrypted_content"
        before = await create(served, input="Hello.")
        assert (await refusal(served, input=[item], previous_response_id=before.id))[
            "param"
        ] == "input[0].encrypted_content"
        compacted = await compact(served)
        await create(served, input=[*input_items, *(bare(each) for each in compacted.output)])
        assert said(served)[-1] == ("user", "They met Ada in Rome.")


async def test_another_tenants_compaction_is_refused() -> None:
    """So is one whose items stand before it."""
    keys = [{"key": name * 20, "tenant": name} for name in ("a", "b")]
    async with serving(scripted(SUMMED, ANSWER), server={"api_keys": keys}) as served:
        compacted = await compact(served)
        theirs: Any = served.client.with_options(api_key="b" * 20).responses
        with pytest.raises(BadRequestError) as caught:
            await theirs.create(model="scripted", input=[bare(item) for item in compacted.output])
    assert caught.value.code == "invalid_encrypted_content"


async def test_keys_are_retired_one_by_one() -> None:
    old, new = "o" * 32, "n" * 32

    def keys(*names: str) -> Json:
        return {"reasoning_keys": names}

    async with serving(scripted(SUMMED), responses=keys(old)) as served:
        output = [bare(item) for item in (await compact(served)).output]
    async with serving(scripted(ANSWER), responses=keys(new, old)) as served:
        assert (await create(served, input=output)).input_transformations is None
        assert ("user", "They met Ada in Rome.") in said(served)
    async with serving(scripted(ANSWER), responses=keys(new)) as served:
        assert (await refusal(served, input=output))["code"] == "invalid_encrypted_content"


REFUSED: dict[str, tuple[Json, str, str]] = {
    "no model": ({"model": None}, "model", "a string"),
    "no input": ({"input": None}, "input", "Missing"),
    "nothing": ({"input": []}, "input", "nothing"),
    "an unknown item": ({"input": [{"type": "what"}]}, "input[0].type", "what"),
    "a compaction of nothing": ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content", "Missing"),
    "an open call": ({"input": TALK[:4]}, "input", "c1"),
    "instructions that are no text": ({"instructions": 1}, "instructions", "a string"),
    "an unknown chain": ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id", "not found"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_compacted_is_refused_by_name(case: tuple[Json, str, str]) -> None:
    fields, param, words = case
    async with serving(scripted(SUMMED)) as served:
        with pytest.raises(BadRequestError) as caught:
            await compact(served, **fields)
        assert not chat_requests(served)
    error: Any = caught.value.body
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"] or error["param"] == "input"


async def test_an_upstreams_failure_is_reported() -> None:
    async with serving(scripted([{"text": "a"}, {"fail": "It is gone."}], [{"reasoning": "hm"}])) as served:
        with pytest.raises(InternalServerError, match=r"It is gone\.") as caught:
            await compact(served)
        assert caught.value.status_code == 502
        with pytest.raises(InternalServerError, match="no summary"):
            await compact(served)
        with pytest.raises(NotFoundError):
            await compact(served, model="other")


async def test_a_client_that_leaves_stops_it() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 60}, {"text": "b"}])) as served:
        inference: Any = served.stack.inference
        timeout = aiohttp.ClientTimeout(total=0.3)
        with pytest.raises(TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{served.url}/v1/responses/compact", json={"model": "scripted", "input": TALK}),
            ):
                pass
        await until(lambda: inference.abandoned_chats)


# --- by themselves ----------------------------------------------------------------------------------------------------


async def test_a_chain_that_grows_too_long_is_compacted_in_the_stream() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER, ANSWER)) as served:
        talk = [TALK[0], {"role": "user", "content": "one"}]
        first = await create(served, input=talk, instructions="Short.", **SMALL)
        assert [item.type for item in first.output] == ["message"]
        events = await stream(served, input="two", previous_response_id=first.id, instructions="Now.", **SMALL)
        summing, answering = chat_requests(served)[1:]
        sent_messages = said(served)
        final = events[-1].response
        await create(served, input="three", previous_response_id=final.id)
        later = said(served)
        stored = await responses(served).retrieve(final.id)
    assert [event.type for event in events[:6]] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.compaction.compacting", "response.output_item.done", "response.output_item.added"),
    ]
    assert (events[2].item.id, events[2].item.encrypted_content) == (events[4].item.id, "")
    assert events[3].item_id == events[4].item.id
    assert [item.type for item in final.output] == ["compaction", "message"]
    assert bare(final.output[0]) == bare(events[4].item)
    assert bare(stored) == bare(final)
    assert [each.role for each in summing.messages] == ["developer", "developer", "user", "assistant", "user", "user"]
    assert sent_messages == [
        ("developer", "Now."),
        ("developer", "Be brief."),
        ("user", "one"),
        ("user", "They met Ada in Rome."),
        ("user", "two"),
    ]
    assert later == [*sent_messages[1:], ("assistant", "Yes."), ("user", "three")]
    assert final.usage.input_tokens == count_words(summing) + count_words(answering)
    assert final.usage.output_tokens == 4


async def test_the_sdk_puts_it_together() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER)) as served:
        first = await create(served, input="one")
        open_stream: Any = served.client.responses.stream
        async with open_stream(model="scripted", input="two", previous_response_id=first.id, **SMALL) as events:
            async for _ in events:
                pass
            final = await events.get_final_response()
        stored = await responses(served).retrieve(final.id)
    assert bare(of_type(final)) == bare(of_type(stored))
    assert final.output_text == "Yes."


async def test_what_came_before_a_compaction_may_be_left_out() -> None:
    talk: list[Json] = [TALK[0], {"role": "user", "content": "one"}, {"role": "assistant", "content": LONG}]
    two, three = ({"role": "user", "content": text} for text in ("two", "three"))
    async with serving(scripted(SUMMED, ANSWER)) as served:
        first = await create(served, input=[*talk, two], store=False, **SMALL)
        output = [bare(item) for item in first.output]
        await create(served, input=[*talk, two, *output, three], store=False)
        whole = said(served)
        await create(served, input=[*output, three], store=False)
        cut = said(served)
    assert whole == cut
    assert cut == [
        ("developer", "Be brief."),
        ("user", "one"),
        ("user", "They met Ada in Rome."),
        ("user", "two"),
        ("assistant", "Yes."),
        ("user", "three"),
    ]


async def test_what_tools_gave_is_compacted_before_the_next_turn() -> None:
    turns: list[Script] = [[call("web_search", '{"query": "rome"}', id="s1")], SUMMED, ANSWER]
    async with browsing(*turns) as (served, _):
        tiny = [{"type": "compaction", "compact_threshold": 5}]
        tools = [{"type": "web_search"}]
        events = await stream(served, input="Look.", tools=tools, context_management=tiny, max_output_tokens=16)
        sent_messages = said(served)
        token_limit = chat_requests(served)[-1].max_completion_tokens
    final = events[-1].response
    assert final.status == "completed"
    assert [item.type for item in final.output] == ["web_search_call", "compaction", "message"]
    assert sent_messages == [("user", "Look."), ("user", "They met Ada in Rome.")]
    assert token_limit == 14  # the call had taken two; what the summary took is not the answer's


async def test_nothing_is_compacted_that_would_not_get_shorter() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER, ANSWER)) as served:
        alone = await create(served, input=LONG, **SMALL)
        assert [item.type for item in alone.output] == ["message"]
        second = await create(served, input=LONG, previous_response_id=alone.id, **SMALL)
        assert [item.type for item in second.output] == ["compaction", "message"]
        sent_messages = said(served)
    # what was said long ago and is long is in the summary alone
    assert sent_messages == [("user", "They met Ada in Rome."), ("user", LONG)]


async def test_a_conversation_is_compacted_too() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER)) as served:
        conversation = await conversations(served).create()
        await create(served, input="one", conversation=conversation.id, **SMALL)
        await create(served, input="two", conversation=conversation.id, **SMALL)
        await create(served, input="three", conversation=conversation.id)
        sent_messages = said(served)
        kinds = [item.type async for item in conversations(served).items.list(conversation.id, order="asc")]
    assert kinds == ["message", "message", "message", "compaction", "message", "message", "message"]
    assert [text for _, text in sent_messages] == ["one", "They met Ada in Rome.", "two", "Yes.", "three"]


async def test_a_conversation_is_read_from_its_compaction_on_unless_the_input_refers_to_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: set[int] = set()
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER)) as served:
        store, conversation = served.stack.kv_store, await conversations(served).create()
        scan, fields = store.scan, {"conversation": conversation.id}

        async def note(prefix: str, **bounds: Any) -> Any:
            rows = await scan(prefix, **bounds)
            read.update(int(key[-10:]) for key, _ in rows if "/conversation_item/" in key)
            return rows

        monkeypatch.setattr(store, "scan", note)
        await create(served, input="one", **fields, **SMALL)
        await create(served, input="two", **fields, **SMALL)
        items = [item async for item in conversations(served).items.list(conversation.id, order="asc")]
        read.clear()
        await create(served, input="three", **fields)
        assert read == {*range([item.type for item in items].index("compaction"), len(items))}
        assert [text for _, text in said(served)][-2:] == ["Yes.", "three"]
        repeated = {"type": "message", "role": "user", "content": "one", "id": items[0].id}
        with pytest.raises(BadRequestError, match="has an item"):
            await create(served, input=[repeated], **fields)
        assert min(read) == 0


async def test_on_a_websocket_what_is_not_stored_is_compacted_too() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER)) as served, talking(served) as talk:
        first = await talk.ask(input="one", store=False)
        second = await talk.ask(input="two", store=False, previous_response_id=first.id, **SMALL)
        await talk.ask(input="three", store=False, previous_response_id=second.id)
        sent_messages = said(served)
    assert [item.type for item in second.output] == ["compaction", "message"]
    assert [text for _, text in sent_messages] == ["one", "They met Ada in Rome.", "two", "Yes.", "three"]


async def test_in_the_background_it_is_the_same() -> None:
    async with serving(scripted([{"text": LONG}], SUMMED, ANSWER)) as served:
        first = await create(served, input="one")
        events = await stream(served, input="two", previous_response_id=first.id, background=True, **SMALL)
    assert [item.type for item in events[-1].response.output] == ["compaction", "message"]


async def test_a_compaction_that_fails_fails_its_response() -> None:
    turns: list[Script] = [[{"text": LONG}], [{"text": "a"}, {"wait_s": 0.2}, {"fail": "It is gone."}], ANSWER]
    async with serving(scripted(*turns)) as served:
        first = await create(served, input="one")
        events = await stream(served, input="two", previous_response_id=first.id, **SMALL)
        final = events[-1].response
        # what is empty is nothing that could be opened
        await create(served, input="three", previous_response_id=final.id)
        assert [text for _, text in said(served)] == ["one", LONG, "two", "three"]
    assert events[-1].type == "response.failed"
    assert final.error.message == "It is gone."
    assert [bare(item)["encrypted_content"] for item in final.output] == [""]


async def test_without_a_threshold_the_models_context_says_when() -> None:
    async with serving(scripted(ANSWER)) as served:
        error = await refusal(served, context_management=[{"type": "compaction"}])
    assert error["param"] == "context_management[0].compact_threshold"


MISMANAGED: dict[str, tuple[Any, str, str]] = {
    "an unknown type": ([{"type": "forgetting"}], "context_management[0].type", "'compaction'"),
    "no type": ([{"compact_threshold": 1}], "context_management[0].type", "Missing"),
    "no tokens": ([{"type": "compaction", "compact_threshold": 0}], "context_management[0].compact_threshold", "least"),
    "words": ([{"type": "compaction", "compact_threshold": "1"}], "context_management[0].compact_threshold", "integer"),
    "twice": ([{"type": "compaction"}] * 2, "context_management", "at most 1"),
    "no list": ({"type": "compaction"}, "context_management", "an array"),
}


@pytest.mark.parametrize("case", MISMANAGED.values(), ids=MISMANAGED)
async def test_what_cannot_be_managed_is_refused_by_name(case: tuple[Any, str, str]) -> None:
    item, param, words = case
    async with serving(scripted(ANSWER)) as served:
        error = await refusal(served, context_management=item)
    assert error["param"] == param
    assert words in error["message"]


async def test_nothing_is_counted_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(scripted(ANSWER)) as served:
        monkeypatch.delattr(type(served.stack.inference), "count_tokens")
        await create(served, input=LONG, tools=[function()], context_management=[])
