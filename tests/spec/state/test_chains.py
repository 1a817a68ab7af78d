"""Conversations that go on by the id of an earlier response, or of an item in it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests, create, messages, plain, refusal, responses, stream
from tests.support.servers.serving import MEMORY, Served, scripted, serving

Json = dict[str, Any]
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]


def said(served: Served) -> list[Any]:
    """Who said what in the newest chat."""
    return [(message["role"], message.get("content")) for message in messages(served)]


def output(call_id: str, text: str = "done") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


async def test_the_model_sees_input_then_output_then_new_input() -> None:
    async with serving(scripted([{"text": "A1"}], [{"text": "A2"}], [{"text": "A3"}])) as served:
        first = await create(served, input="Q1")
        second = await create(served, input="Q2", previous_response_id=first.id)
        third = await create(served, input="Q3", previous_response_id=second.id)
        assert said(served) == [
            ("user", "Q1"),
            ("assistant", "A1"),
            ("user", "Q2"),
            ("assistant", "A2"),
            ("user", "Q3"),
        ]
    assert third.previous_response_id == second.id


async def test_a_streamed_response_can_be_followed_as_soon_as_it_ends() -> None:
    async with serving(scripted([{"text": "A1"}])) as served:
        async for event in await create(served, input="Q1", stream=True):
            if event.type == "response.completed":
                await create(served, input="Q2", previous_response_id=event.response.id)
        assert said(served) == [("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]


async def test_a_chain_may_go_on_without_new_input() -> None:
    async with serving(scripted([{"text": "A1"}])) as served:
        first = await create(served, input="Q1")
        await responses(served).create(model="scripted", previous_response_id=first.id)
        assert said(served) == [("user", "Q1"), ("assistant", "A1")]


async def test_instructions_are_not_inherited() -> None:
    async with serving() as served:
        first = await create(served, instructions="Be brief.")
        second = await create(served, previous_response_id=first.id)
        assert "developer" not in [role for role, _ in said(served)]
        assert second.instructions is None


async def test_new_instructions_come_before_all_earlier_turns() -> None:
    async with serving() as served:
        first = await create(served, instructions="Be brief.")
        await create(served, previous_response_id=first.id, instructions="Be long.")
        assert said(served)[0] == ("developer", "Be long.")
        assert [role for role, _ in said(served)].count("developer") == 1


async def test_two_children_of_one_response_know_nothing_of_each_other() -> None:
    async with serving() as served:
        root = await create(served, input="root")
        one_branch = await create(served, input="left", previous_response_id=root.id)
        right = await create(served, input="right", previous_response_id=root.id)
        trunk = [("user", "root"), ("assistant", "root")]
        for child, name in ((one_branch, "left"), (right, "right"), (one_branch, "left")):
            await create(served, input="leaf", previous_response_id=child.id)
            assert said(served) == [*trunk, ("user", name), ("assistant", name), ("user", "leaf")]


async def test_children_made_at_one_time_are_all_kept() -> None:
    async with serving() as served:
        root = await create(served, input="root")
        names = [f"child{number}" for number in range(8)]
        children = await asyncio.gather(*(create(served, input=name, previous_response_id=root.id) for name in names))
        for child, name in zip(children, names, strict=True):
            await create(served, input="leaf", previous_response_id=child.id)
            assert said(served)[2:] == [("user", name), ("assistant", name), ("user", "leaf")]


async def test_a_fork_may_fork_again() -> None:
    async with serving() as served:
        path = ["a", "b", "c", "d"]
        tip: Any = None
        for name in path:
            tip_id = tip.id if tip else None
            tip = await create(served, input=name, previous_response_id=tip_id)
            await create(served, input="aside", previous_response_id=tip_id)
        await create(served, input="end", previous_response_id=tip.id)
        assert [content for role, content in said(served) if role == "user"] == [*path, "end"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_chain_of_sixty_turns_keeps_every_turn(streamed: bool) -> None:
    async with serving() as served:
        previous: str | None = None
        for number in range(60):
            if streamed:
                last = (await stream(served, input=f"Q{number}", previous_response_id=previous))[-1].response
            else:
                last = await create(served, input=f"Q{number}", previous_response_id=previous)
            previous = last.id
        assert [content for role, content in said(served) if role == "user"] == [f"Q{n}" for n in range(60)]
        assert len(said(served)) == 119


async def test_a_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "responses.db")}
    script = scripted([{"reasoning": "hm"}, call("get", '{"a":1}')])
    async with serving(script, kv_store=store) as served:
        first = await create(served, input="Q1")
    async with serving(kv_store=store) as served:
        await create(served, input=[output("call_1")], previous_response_id=first.id)
        assert messages(served) == [
            {"role": "user", "content": "Q1"},
            {
                "role": "assistant",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        ]
        assert (await responses(served).retrieve(first.id)).model_dump() == first.model_dump()


async def test_deleting_in_the_middle_leaves_later_turns_their_history() -> None:
    async with serving() as served:
        first = await create(served, input="Q1")
        second = await create(served, input="Q2", previous_response_id=first.id)
        third = await create(served, input="Q3", previous_response_id=second.id)
        await responses(served).delete(second.id)
        await create(served, input="Q4", previous_response_id=third.id)
        assert [content for role, content in said(served) if role == "user"] == ["Q1", "Q2", "Q3", "Q4"]
        error = await refusal(served, previous_response_id=second.id)
        assert error["code"] == "previous_response_not_found"


async def test_deleting_the_last_turn_lets_the_one_before_go_on() -> None:
    async with serving() as served:
        first = await create(served, input="Q1")
        second = await create(served, input="Q2", previous_response_id=first.id)
        await responses(served).delete(second.id)
        await create(served, input="Q3", previous_response_id=first.id)
        assert [content for role, content in said(served) if role == "user"] == ["Q1", "Q3"]


async def test_a_call_without_its_output_is_refused_naming_it() -> None:
    async with serving(scripted([call(id="call_x")])) as served:
        first = await create(served)
        error = await refusal(served, input="and?", previous_response_id=first.id)
    assert error["message"] == "No tool output found for function call call_x."
    assert error["param"] == "input"


async def test_an_output_without_its_call_is_refused_naming_it() -> None:
    async with serving() as served:
        first = await create(served)
        error = await refusal(served, input=[output("call_x")], previous_response_id=first.id)
    assert error["message"] == "No tool call found for function call output with call_id call_x."


async def test_some_outputs_of_parallel_calls_are_not_enough() -> None:
    async with serving(scripted([{"calls": [call(id="call_x"), call(id="call_y")]}])) as served:
        first = await create(served)
        error = await refusal(served, input=[output("call_x")], previous_response_id=first.id)
        assert "call_y" in error["message"]
        await create(served, input=[output("call_y"), output("call_x")], previous_response_id=first.id)


async def test_calls_of_several_turns_find_their_outputs() -> None:
    turns = [[call("get", '{"n":1}', id="c1")], [call("get", '{"n":2}', id="c2")], [{"text": "Both."}]]
    async with serving(scripted(*turns)) as served:
        first = await create(served, input="Q")
        second = await create(served, input=[output("c1", "one")], previous_response_id=first.id)
        third = await create(served, input=[output("c2", "two")], previous_response_id=second.id)
        assert [role for role, _ in said(served)] == ["user", "assistant", "tool", "assistant", "tool"]
    assert third.output_text == "Both."


async def test_a_call_id_may_be_used_again_in_a_later_turn() -> None:
    async with serving(scripted([call(id="c")], [call(id="c")], [{"text": "Done."}])) as served:
        first = await create(served)
        second = await create(served, input=[output("c", "one")], previous_response_id=first.id)
        third = await create(served, input=[output("c", "two")], previous_response_id=second.id)
    assert third.output_text == "Done."


async def test_outputs_that_the_chain_has_already_are_left_out() -> None:
    """Semantic Kernel sends the outputs of all rounds with each request; another output of a call is refused."""
    async with serving(scripted([call(id="c1")], [call(id="c2")], [{"text": "Done."}])) as served:
        first = await create(served)
        second = await create(served, input=[output("c1", "one")], previous_response_id=first.id)
        both = [output("c1", "one"), output("c2", "two")]
        error = await refusal(served, input=[output("c1", "uno"), both[1]], previous_response_id=second.id)
        assert error["param"] == "input[0].output"
        assert "c1 has an output already" in error["message"]
        third = await create(served, input=both, previous_response_id=second.id)
        assert third.output_text == "Done."
        assert [each["content"] for each in messages(served) if each["role"] == "tool"] == ["one", "two"]
        assert [item.output for item in (await responses(served).input_items.list(third.id)).data] == ["two"]
        await create(served, input=[*both, {"role": "user", "content": "And?"}], previous_response_id=third.id)


async def test_items_may_be_referred_to_without_a_previous_response() -> None:
    async with serving(scripted([{"reasoning": "hm"}, {"text": "I look."}, call("get", "{}")])) as served:
        first = await create(served, input="Q1")
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        await create(served, input=[{"role": "user", "content": "Q1"}, *references, output("call_1")])
        by_reference = messages(served)
        await create(served, input=[output("call_1")], previous_response_id=first.id)
        assert by_reference == messages(served)


async def test_a_reference_needs_no_type() -> None:
    async with serving(scripted([{"text": "A1"}])) as served:
        first = await create(served)
        await create(served, input=[{"id": first.output[0].id}, {"role": "user", "content": "Q2"}])
        assert said(served) == [("assistant", "A1"), ("user", "Q2")]


async def test_input_items_can_be_referred_to_by_the_clients_own_ids() -> None:
    async with serving() as served:
        await create(served, input=[{"id": "msg_of_mine", "role": "user", "content": "Q1"}])
        await create(served, input=[{"type": "item_reference", "id": "msg_of_mine"}])
        assert said(served) == [("user", "Q1")]


async def test_input_items_can_be_referred_to_by_the_ids_they_were_given() -> None:
    async with serving() as served:
        first = await create(served, input="Q1")
        (item,) = (await responses(served).input_items.list(first.id)).data
        await create(served, input=[{"type": "item_reference", "id": item.id}])
        assert said(served) == [("user", "Q1")]


async def test_a_reference_to_nothing_is_not_found() -> None:
    async with serving() as served:
        error = await refusal(served, 404, input=[{"type": "item_reference", "id": "msg_none"}])
    assert "msg_none" in error["message"]
    assert error["param"] == "input[0].id"


async def test_what_is_not_stored_can_be_neither_followed_nor_referred_to_nor_read() -> None:
    async with serving() as served:
        first = await create(served, store=False)
        assert first.store is False
        error = await refusal(served, previous_response_id=first.id)
        assert error["code"] == "previous_response_not_found"
        reference = {"type": "item_reference", "id": first.output[0].id}
        assert "`store`" in (await refusal(served, 404, input=[reference]))["message"]
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(first.id)


async def test_an_unstored_response_may_follow_a_stored_one() -> None:
    async with serving() as served:
        first = await create(served, input="Q1")
        await create(served, input="Q2", previous_response_id=first.id, store=False)
        assert said(served)[-1] == ("user", "Q2")
        await create(served, input="Q3", previous_response_id=first.id)
        assert [content for role, content in said(served) if role == "user"] == ["Q1", "Q3"]


@pytest.mark.parametrize("unknown", ["resp_none", "resp_" + "0" * 32, "x/../y", "\u00e9", "a b"])
async def test_an_unknown_previous_response_is_refused(unknown: str) -> None:
    async with serving() as served:
        error = await refusal(served, previous_response_id=unknown)
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"
    assert unknown in error["message"]


async def test_another_tenants_ids_are_unknown_ids() -> None:
    async with serving(server={"api_keys": KEYS}, kv_store=MEMORY) as served:
        mine = await create(served)
        item = mine.output[0].id
        async with sdk_client(served.url, "key-of-b") as client:
            theirs = Served(client, served.url, served.app, served.streams)
            unknown = "resp_" + "0" * 32
            for known_ids, missing in (
                ({"previous_response_id": mine.id}, {"previous_response_id": unknown}),
                (
                    {"input": [{"type": "item_reference", "id": item}]},
                    {"input": [{"type": "item_reference", "id": item[:4] + "0" * 36}]},
                ),
            ):
                status = 404 if "input" in known_ids else 400
                one, other = await refusal(theirs, status, **known_ids), await refusal(theirs, status, **missing)
                assert _nameless(one) == _nameless(other)
            for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
                errors: list[Json] = []
                for response_id in (mine.id, unknown):
                    with pytest.raises(NotFoundError) as caught:
                        await ask(response_id)
                    errors.append(_nameless(caught.value.body))
                assert errors[0] == errors[1]
        assert (await responses(served).retrieve(mine.id)).id == mine.id


def _nameless(error: Any) -> Json:
    """The error without the id it names."""
    return {**error, "message": error["message"].partition("'")[0]}


async def test_asking_leaves_the_stored_turns_as_they_are() -> None:
    async with serving(scripted([{"text": "A"}])) as served:
        first = await create(served, input="Q1")
        for _ in range(3):
            await create(served, input="Q2", previous_response_id=first.id)
        sent_chats = {str(plain(chat.messages)) for chat in chat_requests(served)[1:]}
    assert len(sent_chats) == 1
