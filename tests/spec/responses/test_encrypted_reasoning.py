"""Reasoning that a client keeps comes back as it went, to its owner, and cannot be read by others."""

from dataclasses import replace
from typing import Any

from openai.types.responses import Response

from tests.support.sdk.requests import messages
from tests.support.servers.serving import Served, scripted, serving

INCLUDE = ["reasoning.encrypted_content"]
THOUGHT = "The user wants a greeting."
TURNS = ([{"reasoning": ["The user wants ", "a greeting."]}, {"text": "Hello!"}], [{"text": "Again."}])


def reasoning(response: Response) -> Any:
    (item,) = (item for item in response.output if item.type == "reasoning")
    return item


async def first(served: Served, **fields: Any) -> Response:
    request: dict[str, Any] = {"model": "scripted", "input": "Hi", **fields}
    open_stream: Any = served.client.responses.stream
    async with open_stream(**request) as stream:
        async for _ in stream:
            pass
        final: Any = await stream.get_final_response()
    return final


async def second(served: Served, item: Any, model: str = "scripted", **fields: Any) -> Response:
    said: list[Any] = [{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "Go on."}]
    create: Any = served.client.responses.create
    final: Response = await create(model=model, input=said, **fields)
    return final


def sealed_alone(response: Response) -> dict[str, Any]:
    item = reasoning(response)
    return {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}


async def test_a_client_that_keeps_its_history_gets_its_reasoning_sealed() -> None:
    async with serving(scripted(*TURNS)) as served:
        first_response = await first(served, include=INCLUDE)
        sealed = reasoning(first_response).encrypted_content
        assert sealed
        assert THOUGHT not in sealed
        included = await served.client.responses.retrieve(first_response.id, include=["reasoning.encrypted_content"])
        assert reasoning(included).encrypted_content == sealed
        assert reasoning(await served.client.responses.retrieve(first_response.id)).encrypted_content is None


async def test_reasoning_that_is_not_stored_is_sealed_without_being_asked_for() -> None:
    async with serving(scripted(*TURNS)) as served:
        assert reasoning(await first(served, store=False)).encrypted_content
    async with serving(scripted(*TURNS)) as served:
        assert reasoning(await first(served)).encrypted_content is None


async def test_what_was_sealed_reaches_the_model_again() -> None:
    async with serving(scripted(*TURNS)) as served:
        item = sealed_alone(await first(served, store=False))
        tokens = await served.client.responses.input_tokens.count(
            model="scripted",
            input=[{"role": "user", "content": "Hi"}, item],  # type: ignore[list-item]  # as sent back
        )
        bare = await served.client.responses.input_tokens.count(model="scripted", input="Hi")
        assert (tokens.input_tokens or 0) > (bare.input_tokens or 0)
        response = await second(served, item, store=False)
        assert response.output_text == "Again."
        assert response.input_transformations is None


async def test_what_was_sealed_and_put_into_a_conversation_reaches_its_model_and_no_other() -> None:
    async with serving(scripted(*TURNS)) as served:
        item = sealed_alone(await first(served, store=False))
        said: Any = [{"role": "user", "content": "Hi"}, item]
        conversation = await served.client.conversations.create(items=said)
        count = served.client.responses.input_tokens.count
        kept_there = (await count(model="scripted", conversation=conversation.id)).input_tokens
        input_items, bare = [(await count(model="scripted", input=each)).input_tokens for each in (said, "Hi")]
        assert kept_there == input_items > bare
        items = await served.client.conversations.items.list(conversation.id, order="asc")
        listed: Any = items.data[1]
        assert listed.encrypted_content == item["encrypted_content"]
        assert not listed.content, "it is shown as it was given"


async def test_a_sealed_text_that_cannot_be_opened_is_left_out_and_reported() -> None:
    async with serving(scripted(*TURNS)) as served:
        item: Any = {"type": "reasoning", "id": "rs_theirs", "summary": [], "encrypted_content": "gAAAAABfromElsewhere"}
        response = await second(served, item)
        assert response.input_transformations is not None
        assert [each.model_dump() for each in response.input_transformations] == [
            {"id": "rs_theirs", "action": "removed", "reason": "organization_mismatch", "type": "reasoning"}
        ]


async def test_a_token_of_another_tenant_is_left_out() -> None:
    keys = [{"key": "sk-one-0123456789", "tenant": "one"}, {"key": "sk-two-0123456789", "tenant": "two"}]
    async with serving(scripted(*TURNS), server={"api_keys": keys}) as served:
        item = sealed_alone(await first(served, store=False))
        other = replace(served, client=served.client.with_options(api_key="sk-two-0123456789"))
        response = await second(other, item)
        assert response.input_transformations is not None
        assert response.input_transformations[0].reason == "organization_mismatch"


async def test_keys_of_the_config_outlive_the_store() -> None:
    responses = {"reasoning_keys": ["k" * 32]}
    async with serving(scripted(*TURNS), responses=responses) as served:
        item = sealed_alone(await first(served, store=False))
    async with serving(scripted(*TURNS), responses={"reasoning_keys": ["n" * 32, "k" * 32]}) as served:
        assert (await second(served, item)).input_transformations is None
    async with serving(scripted(*TURNS), responses={"reasoning_keys": ["n" * 32]}) as served:
        assert (await second(served, item)).input_transformations is not None


async def test_a_stored_thought_may_come_back_by_its_id_alone() -> None:
    turns = ([{"reasoning": [THOUGHT]}, {"call": "get", "arguments": "{}", "id": "c1"}], [{"text": "Hello!"}])
    async with serving(scripted(*turns)) as served:
        first_response = await first(served, tools=[{"type": "function", "name": "get", "parameters": None}])
        bare: Any = {
            "type": "reasoning",
            "id": reasoning(first_response).id,
            "summary": [],
            "content": [],
            "status": "in_progress",
        }
        call: Any = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"}
        said: list[Any] = [{"role": "user", "content": "Hi"}, bare, call]
        said.append({"type": "function_call_output", "call_id": "c1", "output": "42"})
        await served.client.responses.create(model="scripted", input=said)
        sent_message = messages(served)[1]
    assert (sent_message["reasoning"], len(sent_message["tool_calls"])) == (THOUGHT, 1)
