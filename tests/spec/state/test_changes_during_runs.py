"""Objects that are deleted or changed while a response that uses them is generated: the response ends properly, and can
be read and continued by another process, whether it was streamed, not streamed or in the background."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from openai import ConflictError, NotFoundError

from tests.support.sdk.conversations import conversations, texts
from tests.support.sdk.file_search_stack import store_of
from tests.support.sdk.requests import bare, chat_requests, create, responses
from tests.support.servers.held_model import Held
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of
from tests.support.waiting import until, until_ended

Json = dict[str, Any]
RUNNING = ("queued", "in_progress")


@dataclass
class Change:
    """A request, the change made while it is answered, and the texts that the model gets when it is continued."""

    fields: Json
    make: Callable[[], Awaitable[Any]]
    sent_texts: list[str] = field(default_factory=list[str])


async def delete_previous(served: Served) -> Change:
    first = await create(served, input="first")
    second = await create(served, input="second", previous_response_id=first.id)

    async def make() -> None:
        for each in (second.id, first.id):
            await responses(served).delete(each)

    return Change({"previous_response_id": second.id}, make, ["first", "first", "second", "second"])


async def delete_first_of_chain(served: Served) -> Change:
    first = await create(served, input="first")
    second = await create(served, input="second", previous_response_id=first.id)
    return Change(
        {"previous_response_id": second.id},
        lambda: responses(served).delete(first.id),
        ["first", "first", "second", "second"],
    )


async def delete_referenced_item(served: Served) -> Change:
    first = await create(served, input="first")
    reference = {"type": "item_reference", "id": first.output[0].id}
    fields = {"input": [reference, {"role": "user", "content": "hold"}]}
    return Change(fields, lambda: responses(served).delete(first.id), ["first"])


async def delete_file(served: Served) -> Change:
    file = await served.client.files.create(file=("notes.txt", b"of the file"), purpose="user_data")
    parts = [{"type": "input_text", "text": "hold"}, {"type": "input_file", "file_id": file.id}]
    return Change({"input": [{"role": "user", "content": parts}]}, lambda: served.client.files.delete(file.id))


async def delete_vector_store(served: Served) -> Change:
    store_id, _ = await store_of(served, "bread.md")
    tool = {"type": "file_search", "vector_store_ids": [store_id]}
    return Change({"tools": [tool]}, lambda: served.client.vector_stores.delete(store_id))


async def delete_container(served: Served) -> Change:
    container = await served.client.containers.create(name="mine")
    tool = {"type": "code_interpreter", "container": container.id}
    return Change({"tools": [tool]}, lambda: served.client.containers.delete(container.id))


async def delete_webhook_endpoint(served: Served) -> Change:
    endpoints = cast(Any, served.client.webhooks)
    endpoint = await endpoints.create(name="n", url="https://localhost/hook", event_types=["response.completed"])
    return Change({}, lambda: endpoints.delete(endpoint.id))


async def delete_conversation_item(served: Served) -> Change:
    conversation = await conversations(served).create(items=[{"role": "user", "content": "first"}])
    (item,) = (await conversations(served).items.list(conversation.id)).data

    async def make() -> None:
        with pytest.raises(ConflictError):  # the items of a conversation are those that its turn has read
            await conversations(served).items.delete(item.id, conversation_id=conversation.id)

    return Change({"conversation": conversation.id}, make, ["first"])


async def rename_conversation(served: Served) -> Change:
    conversation = await conversations(served).create(items=[{"role": "user", "content": "first"}])
    return Change(
        {"conversation": conversation.id},
        lambda: conversations(served).update(conversation.id, metadata={"a": "b"}),
        ["first"],
    )


async def revoke_key(served: Served) -> Change:
    served.client.api_key = str(ROOT["key"])
    organization = organization_of(served.client)
    project_id, key = await new_project(organization)
    served.client.api_key = key
    keys = (await organization.projects.api_keys.list(project_id)).data
    reader = await organization.projects.service_accounts.create(project_id, name="reader")

    async def make() -> None:
        served.client.api_key = reader.api_key.value  # what runs in the background is still looked at
        await organization.projects.api_keys.delete(keys[0].id, project_id=project_id)

    return Change({}, make)


CHANGES = [
    delete_previous,
    delete_first_of_chain,
    delete_referenced_item,
    delete_file,
    delete_vector_store,
    pytest.param(delete_container, marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")),
    delete_webhook_endpoint,
    delete_conversation_item,
    rename_conversation,
    revoke_key,
]


PYTHON: Json = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON}
VECTORS = {"provider": "hybrid", "embedding_model": "hashing"}


@asynccontextmanager
async def two_processes(folder: Path, prepare: object = None) -> AsyncGenerator[tuple[Served, Served]]:
    """Two stacks on one store, as two processes see it, with the sections that a change needs."""
    store = {"provider": "sqlite", "path": str(folder / "store.db"), "survives_power_loss": False}
    more: Json = {"files": {"provider": "kv"}}
    if prepare is delete_vector_store:
        more = {"vector_index": {"provider": "sqlite_vec", "path": str(folder / "v.db")}, "vector_stores": VECTORS}
    server: Json = {}
    if prepare is revoke_key:
        more, server = CHAINED, {"api_keys": [ROOT]}
    async with AsyncExitStack() as stacks:
        both = [
            await stacks.enter_async_context(
                serving(
                    {"provider": "tests.support.servers.held_model:Held"},
                    kv_store=store,
                    responses={"background": {"poll_s": 0.05, "lease_s": 5}},
                    server=server,
                    tool_runtime=PYTHON if prepare is delete_container else None,
                    more=more,
                )
            )
            for _ in range(2)
        ]
        yield both[0], both[1]


def read_held(served: Served) -> Held:
    return cast(Held, served.stack.inference)


async def answer(served: Served, way: str, fields: Json) -> Any:
    """Return a response at its end."""
    fields = {"input": "hold", **fields}
    if way == "plain":
        return await create(served, **fields)
    if way == "streamed":
        return [event async for event in await create(served, stream=True, **fields)][-1].response
    response = await create(served, background=True, **fields)
    return await until_ended(responses(served), response.id)


async def answer_during(served: Served, change: Change, ways: tuple[str, ...]) -> list[Any]:
    """Return the answers to the request in each way; the change is made while all of them are generated."""
    answering = [asyncio.create_task(answer(served, way, change.fields)) for way in ways]
    await until(lambda: read_held(served).held_count >= len(ways))
    await change.make()
    read_held(served).released.set()
    return await asyncio.gather(*answering)


@pytest.mark.parametrize("prepare", CHANGES, ids=lambda prepare: prepare.__name__)
async def test_a_response_outlives_a_change_of_what_it_uses(
    prepare: Callable[[Served], Awaitable[Change]], tmp_path: Path
) -> None:
    """A run ends properly after any deletion meanwhile, and its chain is whole in every process."""
    async with two_processes(tmp_path, prepare) as (one, other):
        change = await prepare(one)
        other.client.api_key = one.client.api_key
        is_turn = "conversation" in change.fields
        for response in await answer_during(
            one, change, ("plain",) if is_turn else ("plain", "streamed", "background")
        ):
            assert (response.status, response.error) == ("completed", None)
            if prepare is revoke_key:
                continue
            assert bare(await responses(other).retrieve(response.id)) == bare(response)
            items = [item async for item in responses(other).input_items.list(response.id)]
            assert "hold" in str(items)
            link = {"conversation": change.fields["conversation"]} if is_turn else {"previous_response_id": response.id}
            if prepare is delete_container:
                continue  # its turns are continued with another container
            for _ in range(2):  # the second has a fork, or a longer conversation, before it
                await create(other, input="on", **link)
                sent_texts = [str(message.content) for message in chat_requests(other)[-1].messages]
                assert sent_texts[: len(change.sent_texts)] == change.sent_texts
                assert "hold" in sent_texts[len(change.sent_texts)]


@pytest.mark.parametrize("way", ["plain", "streamed", "background"])
async def test_a_turn_of_a_conversation_that_is_deleted_meanwhile_fails_by_name(way: str, tmp_path: Path) -> None:
    """The failed response says why, and can be read in another process."""
    async with two_processes(tmp_path) as (one, other):
        conversation = await conversations(one).create(items=[{"role": "user", "content": "first"}])
        change = Change({"conversation": conversation.id}, lambda: conversations(one).delete(conversation.id))
        if way == "plain":
            with pytest.raises(NotFoundError, match="was deleted before the response ended"):
                await answer_during(one, change, (way,))
            return
        (response,) = await answer_during(one, change, (way,))
        assert response.status == "failed"
        assert "was deleted before the response ended" in response.error.message
        if way == "background":
            assert bare(await responses(other).retrieve(response.id)) == bare(response)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_waiting_response_keeps_the_deleted_one_before_it(restarts: bool, tmp_path: Path) -> None:
    """A background response that has not begun, or whose worker has left, follows what its client has continued."""
    async with two_processes(tmp_path) as (one, other):
        first = await create(one, input="first")
        waiting = await create(one, input="hold", previous_response_id=first.id, background=True)
        await until(lambda: read_held(one).held_count)
        await responses(one).delete(first.id)
        read_held(other).released.set()
        if restarts:
            await one.stack.responses.drain()
        else:
            read_held(one).released.set()
        ended = await until_ended(responses(other), waiting.id)
        assert (ended.status, ended.output_text) == ("completed", "hold")
        with pytest.raises(NotFoundError):
            await responses(other).retrieve(first.id)
        await create(other, input="on", previous_response_id=waiting.id)
        assert [str(message.content) for message in chat_requests(other)[-1].messages[:2]] == ["first", "first"]
        store = other.stack.kv_store
        await responses(other).delete(waiting.id)
        branches = [key for key, _ in await store.scan("default/branch/")]
        assert not branches


async def test_deleting_a_response_that_another_conversation_holds_changes_nothing(tmp_path: Path) -> None:
    """The items of a turn are the conversation's own."""
    async with two_processes(tmp_path) as (one, other):
        conversation = await conversations(one).create()
        first = await create(one, input="first", conversation=conversation.id)
        change = Change({"conversation": conversation.id}, lambda: responses(one).delete(first.id))
        (response,) = await answer_during(one, change, ("plain",))
        assert response.status == "completed"
        assert await texts(other, conversation.id) == ["first", "first", "hold", "hold"]
