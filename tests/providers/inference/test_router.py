"""Router over real providers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import ValidationError

from apis.deltas import TextDelta
from apis.documents.embeddings import EmbeddingRequest
from apis.errors import InvalidRequest, ModelNotFound, RateLimited, UpstreamError
from providers.inference.router import Router
from tests.conformance.inference import LAWS, Law, Subject, drain
from tests.providers.inference.remote import chat_request, started
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    Answer,
    UpstreamServer,
    call_chunks,
    delta_chunk,
    error_answer,
    event,
    head,
    http_chunk,
    json_answer,
    stream,
    text_chunks,
)
from tests.support.waiting import until


class Site:
    """Two servers, `a` with m1 and org/shared, `b` with m2 and org/shared, and routers over both."""

    def __init__(self, stack: AsyncExitStack, a: UpstreamServer, b: UpstreamServer) -> None:
        self.stack, self.a, self.b = stack, a, b

    async def router(self, **fields: Any) -> Router:
        providers = {
            name: await self.stack.enter_async_context(started(server.base_url, max_retries=0))
            for name, server in (("a", self.a), ("b", self.b))
        }
        config = Router.Config.model_validate({"providers": {"a": {}, "b": {}}, "refresh_interval_s": 0, **fields})
        return Router(config, providers)

    def requested_models(self) -> list[list[str]]:
        return [[request.json["model"] for request in server.chats] for server in (self.a, self.b)]


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(UpstreamServer(stream(text_chunks("a")), models=["m1", "org/shared"]))
        b = await stack.enter_async_context(UpstreamServer(stream(text_chunks("b")), models=["m2", "org/shared"]))
        yield Site(stack, a, b)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_router_conforms(law: Law, site: Site) -> None:
    if "left" in law.__name__ or "cancelled" in law.__name__:
        site.a = await site.stack.enter_async_context(
            UpstreamServer(
                [head(), http_chunk(event(delta_chunk(content="a"))), HANG], stream(text_chunks("a")), models=["m1"]
            )
        )
    if law.__name__ == "a_call_is_made":
        site.a = await site.stack.enter_async_context(UpstreamServer(stream(call_chunks("f", "{}")), models=["m1"]))
    router = await site.router()
    subject = Subject(
        router,
        chat_request(model="m1"),
        chat_request(model="m1"),
        chat_request(model="m1"),
        chat_request(model="x"),
        site.a.left,
    )
    await law(subject)


async def test_a_model_goes_to_the_provider_that_lists_it(site: Site) -> None:
    router = await site.router()
    for model in ("m1", "m2", "org/shared", "b/org/shared", "b/unlisted"):
        await drain(router, chat_request(model=model))
    assert site.requested_models() == [["m1", "org/shared"], ["m2", "org/shared", "unlisted"]]


async def test_all_models_are_listed_with_the_aliases(site: Site) -> None:
    router = await site.router(aliases={"small": "m2", "gone": "nowhere", "m1": "m2"})
    models = {model.id: model for model in await router.models()}
    assert list(models) == ["m1", "org/shared", "m2", "b/org/shared", "small"]
    assert models["small"].context_tokens == 4096


async def test_an_alias_and_the_default_are_sent_under_the_models_own_id(site: Site) -> None:
    router = await site.router(aliases={"small": "b/m2", "other": "m1"}, default="small")
    for model in ("small", "other", "anything"):
        await drain(router, chat_request(model=model))
    assert site.requested_models() == [["m1"], ["m2", "m2"]]


async def test_a_fixed_list_is_not_queried_and_may_rename(site: Site) -> None:
    router = await site.router(models={"a": {"nice": "m1"}})
    assert [model.id for model in await router.models()] == ["nice", "m2", "org/shared"]
    for model in ("nice", "a/nice"):
        await drain(router, chat_request(model=model))
    for model in ("m1", "a/m1"):
        with pytest.raises(ModelNotFound):
            await drain(router, chat_request(model=model))
    assert site.requested_models() == [["m1", "m1"], []]
    assert all(request.path != "/v1/models" for request in site.a.received)


async def test_tokens_are_counted_where_the_model_is(site: Site) -> None:
    router = await site.router()
    assert await router.count_tokens(chat_request(model="m2")) == 5
    assert site.b.received[-1].path == "/tokenize"


async def test_an_unknown_model_is_named_as_the_client_named_it(site: Site) -> None:
    router = await site.router(aliases={"nick": "m1"})
    with pytest.raises(ModelNotFound, match="'nowhere'"):
        await drain(router, chat_request(model="nowhere"))
    site.a.then(error_answer(404, "The model `m1` does not exist."))
    await drain(router, chat_request(model="nick"))
    with pytest.raises(ModelNotFound, match="'nick'"):
        await drain(router, chat_request(model="nick"))


async def test_a_provider_that_is_down_takes_nothing_but_its_own_models_away(site: Site) -> None:
    router = await site.router()
    await site.a.stop()
    assert [model.id for model in await router.models()] == ["m2", "org/shared"]
    await drain(router, chat_request(model="m2"))
    with pytest.raises(UpstreamError):
        await drain(router, chat_request(model="m1"))


async def test_the_list_of_a_provider_stays_while_it_is_down(site: Site) -> None:
    router = await site.router()
    before = await router.models()
    await site.a.stop()
    assert await router.models() == before
    with pytest.raises(ModelNotFound):
        await drain(router, chat_request(model="nowhere"))


async def test_an_error_reports_that_no_provider_responds(site: Site) -> None:
    router = await site.router()
    await site.a.stop()
    await site.b.stop()
    with pytest.raises(UpstreamError):
        await router.models()


async def test_a_provider_that_hangs_is_not_waited_for(site: Site) -> None:
    site.a.routes["/v1/models"] = [HANG]
    router = await site.router(list_timeout_s=0.1)
    assert [model.id for model in await router.models()] == ["m2", "org/shared"]


async def test_unknown_models_do_not_query_the_providers_every_time(site: Site) -> None:
    router = await site.router(refresh_interval_s=60)
    for _ in range(3):
        with pytest.raises(ModelNotFound):
            await drain(router, chat_request(model="nowhere"))
    assert len(site.a.received) == 1


def test_a_list_for_a_missing_provider_is_refused() -> None:
    with pytest.raises(ValidationError, match="not there: c"):
        Router.Config.model_validate({"providers": {"a": {}}, "models": {"c": {}}})


# --- fail-over -------------------------------------------------------------------------------------------------------

SHARED = "org/shared"


def texts_of(deltas: list[Any]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


async def ask(router: Router, model: str = SHARED, **fields: Any) -> str:
    return texts_of(await drain(router, chat_request(model=model, **fields)))


async def test_a_model_of_two_providers_is_served_by_the_other_where_one_is_dead(site: Site) -> None:
    """Before the first output another provider that lists the same model is asked."""
    router = await site.router()
    assert await ask(router) == "a"
    await site.a.stop()
    assert [await ask(router) for _ in range(4)] == ["b"] * 4
    with pytest.raises(UpstreamError):
        await ask(router, f"a/{SHARED}")
    with pytest.raises(UpstreamError):
        await ask(router, "m1")
    assert await router.count_tokens(chat_request(model=SHARED)) == 5


@pytest.mark.parametrize(
    "answer", [error_answer(503), error_answer(500), error_answer(429), error_answer(401), [CUT], [head(), CUT]]
)
async def test_a_provider_that_refuses_is_followed_by_the_next(site: Site, answer: Answer) -> None:
    """Also where it answers, but generates nothing."""
    site.a = await site.stack.enter_async_context(UpstreamServer(answer, models=[SHARED]))
    assert await ask(await site.router()) == "b"


@pytest.mark.parametrize(
    "lack",
    [
        error_answer(404, "The model does not exist."),
        error_answer(400, "This model's maximum context length is 8 tokens."),
    ],
    ids=["model", "context"],
)
async def test_the_failure_of_a_provider_is_not_hidden_by_what_the_next_one_lacks(site: Site, lack: Answer) -> None:
    """The client may try again later, which it would not do after a 404 or 400."""
    site.a = await site.stack.enter_async_context(UpstreamServer(error_answer(429), models=[SHARED]))
    site.b = await site.stack.enter_async_context(UpstreamServer(lack, models=[SHARED]))
    with pytest.raises(RateLimited):
        await ask(await site.router())
    assert len(site.b.chats) == 1


async def test_what_has_begun_is_not_begun_again(site: Site) -> None:
    """A stream that breaks after its first output fails."""
    answer = [head(), http_chunk(event(delta_chunk(content="half"))), CUT]
    site.a = await site.stack.enter_async_context(UpstreamServer(answer, models=[SHARED]))
    with pytest.raises(UpstreamError):
        await ask(await site.router())
    assert site.b.chats == []


async def test_a_request_that_is_wrong_is_not_sent_to_another_provider(site: Site) -> None:
    """Its error is the client's."""
    site.a = await site.stack.enter_async_context(UpstreamServer(error_answer(400, "no"), models=[SHARED]))
    with pytest.raises(InvalidRequest):
        await ask(await site.router())
    assert site.b.chats == []


async def test_a_provider_that_failed_often_is_asked_last_until_it_recovers(site: Site) -> None:
    """Each provider has a breaker; one request after its window finds out if it is back."""
    answers = [error_answer(503), error_answer(503), stream(text_chunks("a again"))]
    site.a = await site.stack.enter_async_context(UpstreamServer(*answers, models=[SHARED]))
    router = await site.router(breaker_failures=2, breaker_window_s=0.2)
    assert [await ask(router) for _ in range(5)] == ["b"] * 5
    assert len(site.a.chats) == 2
    async with asyncio.timeout(5):
        while await ask(router) != "a again":
            pass
    assert await ask(router) == "a again"


async def test_a_provider_whose_servers_do_not_answer_their_checks_is_asked_last(site: Site) -> None:
    """No request has to find that out."""
    async with started(site.a.base_url, max_retries=0, health_interval_s=0.05) as a, started(site.b.base_url) as b:
        router = Router(Router.Config.model_validate({"providers": {"a": {}, "b": {}}}), {"a": a, "b": b})
        assert await ask(router) == "a"
        await site.a.stop()
        assert await ask(router) == "b"
        await until(lambda: not a.upstreams()[0].is_healthy)
        assert router._breakers["a"].allows_request()  # pyright: ignore[reportPrivateUsage] - it was not the breaker
        assert await ask(router) == "b"


async def test_a_provider_that_was_down_when_models_were_listed_is_found(site: Site) -> None:
    """The lists are read again when the known providers of a model have failed."""
    url = site.b.base_url
    await site.b.stop()
    router = await site.router()
    assert await ask(router) == "a"
    await site.a.stop()
    port = int(url.rsplit(":", 1)[1].removesuffix("/v1"))
    async with UpstreamServer(stream(text_chunks("b")), models=[SHARED], port=port):
        assert await ask(router) == "b"


async def test_providers_of_a_model_share_it_and_a_chain_stays_with_one(site: Site) -> None:
    router = await site.router(share=True)
    for number in range(16):
        for _ in range(2):
            await drain(router, chat_request(model="org/shared", prompt_cache_key=f"chain {number}"))
    counts = [len(server.chats) for server in (site.a, site.b)]
    assert sum(counts) == 32
    assert all(count and count % 2 == 0 for count in counts)
    for _ in range(4):
        await drain(router, chat_request(model="org/shared"))
    assert [len(server.chats) for server in (site.a, site.b)] == [counts[0] + 2, counts[1] + 2]
    await drain(router, chat_request(model="m1", prompt_cache_key="chain 1"))
    assert len(site.a.chats) == counts[0] + 3


async def test_a_shared_chain_moves_when_its_provider_fails_and_stays_there(site: Site) -> None:
    router = await site.router(share=True)
    request = chat_request(model="org/shared", prompt_cache_key="chain")
    await drain(router, request)
    home, other = (site.a, site.b) if site.a.chats else (site.b, site.a)
    home.routes["/v1/chat/completions"] = error_answer(503)
    await drain(router, request)
    assert (len(home.chats), len(other.chats)) == (2, 1)
    del home.routes["/v1/chat/completions"]
    await drain(router, request)
    assert (len(home.chats), len(other.chats)) == (2, 2)


def test_sharing_needs_failover() -> None:
    with pytest.raises(ValidationError, match="share needs failover"):
        Router.Config.model_validate({"providers": {"a": {}}, "share": True, "failover": False})


async def test_failover_can_be_turned_off(site: Site) -> None:
    """Then the first provider alone serves an id."""
    router = await site.router(failover=False)
    assert await ask(router) == "a"
    await site.a.stop()
    with pytest.raises(UpstreamError):
        await ask(router)


async def test_embeddings_fail_over_too(site: Site) -> None:
    body = {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}}
    site.b.routes["/v1/embeddings"] = json_answer(body)
    site.a.routes["/v1/embeddings"] = error_answer(503)
    router = await site.router()
    vectors = await router.embed(EmbeddingRequest.model_validate({"model": SHARED, "input": ["x"]}))
    assert len(vectors.vectors) == 1
