"""Cache salts: the tenants' prompts are kept apart upstream, on every route, and nothing is sent where one is alone."""

from typing import Any

import pytest

from apis.chat import TENANT_SALT_PREFIX, ChatRequest, Message
from apis.errors import Unsupported
from providers.inference.chat_completions.body import ChatDialect, request_to_body
from stack.http.cache_salts import CacheSalts
from stack.server_config import HttpServerConfig
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving

KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("a", "b")]


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[Message(role="user", content="hi")], **fields)


def salts(*keys: dict[str, str]) -> CacheSalts:
    return CacheSalts(HttpServerConfig.model_validate({"api_keys": [*keys]}))


async def ask_everywhere(served: Served, key: str, **fields: Any) -> set[str | None]:
    """The salts that the model was asked with, by one tenant, in every way there is."""
    before = len(chat_requests(served))
    async with sdk_client(served.url, key) as client:
        response = await client.responses.create(model="scripted", input="hi", extra_body=fields)
        await client.responses.create(model="scripted", input="ho", previous_response_id=response.id, extra_body=fields)
        said: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="scripted", messages=said, extra_body=fields)
        async with await client.responses.create(
            model="scripted", input="hi", background=True, stream=True, extra_body=fields
        ) as events:
            async for _ in events:
                pass
        async with talking(served, client) as talk:
            await talk.ask(**fields)
    sent_requests = chat_requests(served)[before:]
    assert len(sent_requests) == 5
    return {each.cache_salt for each in sent_requests}


async def test_each_tenant_has_one_salt_and_no_other_tenant_can_have_it() -> None:
    async with serving(server={"api_keys": KEYS}) as served:
        (one,) = await ask_everywhere(served, "key-of-a")
        (other,) = await ask_everywhere(served, "key-of-b")
        assert one is not None
        assert one.startswith(TENANT_SALT_PREFIX)
        (forged,) = await ask_everywhere(served, "key-of-b", cache_salt=one)
        (narrowed,) = await ask_everywhere(served, "key-of-a", cache_salt="mine")
    assert len({one, other, forged, narrowed, "mine"}) == 5


async def test_a_server_of_one_tenant_hands_on_what_it_is_given() -> None:
    for server in ({}, {"api_keys": [KEYS[0], {"key": "another", "tenant": "a"}]}):
        async with serving(server=server) as served:
            key = "key-of-a" if server else "none"
            assert await ask_everywhere(served, key) == {None}
            assert await ask_everywhere(served, key, cache_salt="mine") == {"mine"}


def test_all_workers_of_a_config_make_the_same_salts_and_new_keys_make_others() -> None:
    one, same = salts(*KEYS), salts(*reversed(KEYS))
    other = salts(*KEYS, {"key": "more", "tenant": "a"})
    salted = one.add_salt(request(), "a").cache_salt
    assert salted == same.add_salt(request(), "a").cache_salt
    assert salted != other.add_salt(request(), "a").cache_salt


def test_an_engine_without_salts_gets_none_and_refuses_that_of_a_client() -> None:
    plain = ChatDialect(engine="openai")
    assert b"cache_salt" not in request_to_body(salts(*KEYS).add_salt(request(), "a"), plain)
    assert b"cache_salt" in request_to_body(salts(*KEYS).add_salt(request(), "a"), ChatDialect())
    with pytest.raises(Unsupported, match="cache_salt"):
        request_to_body(salts(*KEYS).add_salt(request(cache_salt="mine"), "a"), plain)
