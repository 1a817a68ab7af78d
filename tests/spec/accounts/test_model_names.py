"""A model by all its names: permissions, limits, prices and usage are the same for each, on every route."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from openai import APIStatusError, AsyncOpenAI, NotFoundError, PermissionDeniedError, RateLimitError

from apis.accounts.accounts import Caller
from apis.accounts.limits import NANOS, RateLimit
from apis.accounts.project_settings import ProjectSettings
from apis.accounts.requests import UpdateRateLimit
from apis.inference import ModelNames
from tests.spec.accounts.test_stored_keys import new_key
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, stream, text_chunks
from tests.support.tenants.accounts import stored_organization

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("dear", "chat/dear", "alias", "unknown-elsewhere")
"""All names of one model: its id, its full name, an alias, and any name that falls to the default."""
ROUTER: dict[str, Any] = {
    "provider": "router",
    "providers": {
        "chat": {"provider": "scripted", "model": "dear"},
        "other": {"provider": "scripted", "model": "cheap"},
        "twin": {"provider": "scripted", "model": "dear"},
    },
    "aliases": {"alias": "dear"},
    "default": "dear",
}
PROMPTS: dict[str, Any] = {"dear": {"versions": {"1": {"instructions": "Hi.", "model": "alias"}}}}
STORED: dict[str, Any] = {
    "accounts": {"provider": "stored", "prices": {"dear": {"input": 1e6, "output": 1e6}}},
}
Call = Callable[[AsyncOpenAI, str], Awaitable[Any]]
SAID: Any = [{"role": "user", "content": "hi"}]
ROUTES: Mapping[str, Call] = {
    "responses": lambda client, model: client.responses.create(model=model, input="hi"),
    "unstored": lambda client, model: client.responses.create(model=model, input="hi", store=False),
    "background": lambda client, model: client.responses.create(model=model, input="hi", background=True),
    "chat": lambda client, model: client.chat.completions.create(model=model, messages=SAID),
    "completions": lambda client, model: client.completions.create(model=model, prompt="hi"),
    "embeddings": lambda client, model: client.embeddings.create(model=model, input="hi"),
    "input_tokens": lambda client, model: client.responses.input_tokens.count(model=model, input="hi"),
    "compact": lambda client, model: client.responses.compact(model=model, input="hi"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(ROUTER, more=STORED, responses={"prompts": PROMPTS}) as running:
        yield running


@asynccontextmanager
async def client_of(
    served: Served,
    project: str,
    *scopes: str,
    settings: ProjectSettings | None = None,
    limits: Mapping[str, RateLimit] | None = None,
) -> AsyncGenerator[AsyncOpenAI]:
    """A client with a key of a project, whose settings and limits hold from its first request on."""
    accounts = served.stack.accounts
    key = await new_key(served, project, *scopes)
    organization = stored_organization(accounts)
    if settings is not None:
        await organization.settings.change_settings(project, lambda _: settings, {})
    for subject, limit in (limits or {}).items():
        update = UpdateRateLimit(max_requests_per_1_day=limit.day_requests)
        await organization.limiter.set_limit(project, subject, update)
    async with sdk_client(served.url, key.value) as client:
        yield client


@pytest.mark.parametrize("closed", NAMES)
async def test_a_model_that_is_closed_under_one_name_is_closed_under_all_on_every_route(
    served: Served, closed: str
) -> None:
    """Aliases, `provider/model`, the default and the model of a prompt are the model itself."""
    settings = ProjectSettings(model_ids=(closed,))
    async with client_of(served, f"closed-{closed.replace('/', '-')}", settings=settings) as client:
        for call in ROUTES.values():
            for name in NAMES if closed != "unknown-elsewhere" else [closed]:
                with pytest.raises(PermissionDeniedError) as refusal:
                    await call(client, name)
                assert (refusal.value.param, refusal.value.code) == ("model", "model_not_allowed")
        if closed != "unknown-elsewhere":
            with pytest.raises(PermissionDeniedError):
                await client.responses.create(prompt={"id": "dear"})
            async with talking(served, client) as talk:
                assert (await talk.refused(model="chat/dear")).status == 403
        assert (await client.responses.create(model="other/cheap", input="hi")).status == "completed"


async def test_a_closed_id_is_closed_at_every_provider_that_has_it(served: Served) -> None:
    """The model of the same id at another provider is no way around."""
    async with client_of(served, "shared", settings=ProjectSettings(model_ids=("dear",))) as client:
        with pytest.raises(PermissionDeniedError):
            await client.responses.create(model="twin/dear", input="hi")
    async with client_of(served, "one", settings=ProjectSettings("allow_list", ("dear",))) as client:
        assert (await client.responses.create(model="alias", input="hi")).model == "alias"
        with pytest.raises(PermissionDeniedError):
            await client.responses.create(model="twin/dear", input="hi")


async def test_a_key_that_is_bound_to_a_model_reaches_it_by_all_its_names(served: Served) -> None:
    """The `model:` scope of a key means the model."""
    async with client_of(served, "bound", "model:alias") as client:
        for name in NAMES:
            assert (await client.responses.create(model=name, input="hi")).status == "completed"
        for name in ("cheap", "other/cheap", "twin/dear"):
            with pytest.raises(PermissionDeniedError):
                await client.responses.create(model=name, input="hi")


@pytest.mark.parametrize("limited", ["dear", "alias", "chat/dear"])
async def test_a_limit_of_a_model_holds_for_all_its_names_on_every_route(served: Served, limited: str) -> None:
    """Also for the model of a prompt, and where tokens are only counted."""
    limits = {limited: RateLimit(day_requests=0)}
    async with client_of(served, f"limited-{limited.replace('/', '-')}", limits=limits) as client:
        for call in ROUTES.values():
            for name in ("dear", "chat/dear", "alias"):
                with pytest.raises(RateLimitError):
                    await call(client, name)
        with pytest.raises(RateLimitError):
            await client.responses.create(prompt={"id": "dear"})
        assert (await client.responses.create(model="cheap", input="hi")).status == "completed"


async def test_cost_and_usage_are_those_of_the_model_whichever_name_was_sent(served: Served) -> None:
    """One row of usage for one model, at its price."""
    since = int(time.time()) - 3600
    async with client_of(served, "counted") as client:
        used = 0
        for name in NAMES:
            for call in (ROUTES["responses"], ROUTES["unstored"]):
                used += (await call(client, name)).usage.total_tokens
            used += (await ROUTES["chat"](client, name)).usage.total_tokens
    log = stored_organization(served.stack.accounts).usage_log
    entries = [each for each in await log.read(since, since + 7300) if each.subject.project_id == "counted"]
    assert {entry.subject.model for entry in entries} == {"dear"}
    assert sum(entry.counts.cost for entry in entries) == used * NANOS


async def test_a_model_without_a_price_is_refused_under_a_limit_of_spending(served: Served) -> None:
    """A model without a price is not free."""
    async with client_of(served, "spending") as client:
        spending = stored_organization(served.stack.accounts).spend_limits
        await spending.set("spending", 1_000_000 * NANOS)
        for name in ("cheap", "other/cheap"):
            with pytest.raises(PermissionDeniedError) as refusal:
                await client.responses.create(model=name, input="hi")
            assert (refusal.value.param, refusal.value.code) == ("model", "model_without_price")
        for name in (*NAMES, "twin/dear"):
            assert (await client.responses.create(model=name, input="hi")).status == "completed"
        used = await spending.get("spending")
        assert used.spent > 0


async def test_a_name_that_no_list_has_passes_no_closed_model() -> None:
    """Many servers answer to any name."""
    async with UpstreamServer(stream(text_chunks("a")), models=["dear"]) as upstream:
        site = {"provider": "vllm", "base_url": upstream.base_url, "lists_all_models": False}
        for inference in (site, {"provider": "router", "providers": {"chat": site}}):
            async with serving(inference, more=STORED) as served:
                settings = ProjectSettings(model_ids=("dear",))
                async with client_of(served, "closed", settings=settings) as client:
                    for name in ("chat/Dear", "anything"):
                        with pytest.raises(NotFoundError):
                            await client.responses.create(model=name, input="hi")
                async with client_of(served, "limited", limits={"dear": RateLimit(day_requests=9)}) as client:
                    with pytest.raises(NotFoundError):
                        await client.responses.create(model="anything", input="hi")
        assert upstream.chats == []


async def test_a_name_passes_no_closed_model_where_a_server_lists_nothing() -> None:
    """Each name may then be that of the closed model."""
    async with UpstreamServer(stream(text_chunks("a")), models=[]) as upstream:
        site = {"provider": "vllm", "base_url": upstream.base_url, "lists_all_models": False}
        for inference in (site, {"provider": "router", "providers": {"chat": site}, "default": "chat/dear"}):
            async with serving(inference, more=STORED) as served:
                settings = ProjectSettings(model_ids=("dear",))
                async with client_of(served, "closed", settings=settings) as client:
                    for name in ("dear", "chat/dear", "Dear", "anything"):
                        with pytest.raises((NotFoundError, PermissionDeniedError)):
                            await client.responses.create(model=name, input="hi")
                for settings in (ProjectSettings("allow_list", ()), ProjectSettings("allow_list", ("dear",))):
                    async with client_of(served, f"allowed-{len(settings.model_ids)}", settings=settings) as client:
                        with pytest.raises(PermissionDeniedError):
                            await client.responses.create(model="anything", input="hi")
        assert upstream.chats == []


async def test_the_default_tag_of_a_model_is_no_other_model() -> None:
    """Ollama serves `small:latest` as `small`, too."""
    async with UpstreamServer(stream(text_chunks("a")), models=["small:latest"]) as upstream:
        site = {"provider": "vllm", "base_url": upstream.base_url, "engine": "openai"}
        async with serving({"provider": "router", "providers": {"chat": site}}, more=STORED) as served:
            for closed in ("small", "small:latest"):
                settings = ProjectSettings(model_ids=(closed,))
                async with client_of(served, f"tag{len(closed)}", settings=settings) as client:
                    for name in ("small:latest", "chat/small", "chat/small:latest"):
                        with pytest.raises(APIStatusError) as refusal:
                            await client.responses.create(model=name, input="hi")
                        assert refusal.value.status_code == 403, name


async def test_a_model_with_the_name_of_another_subject_burns_no_limit_of_it() -> None:
    """`key:KEY_ID`, `*` and `@organization` are no models."""
    limits = {"*": RateLimit(), "key:own": RateLimit(), "key:other": RateLimit()}
    caller = Caller("p", "own", limits=limits)
    for name in ("key:other", "*", "@organization"):
        model = ModelNames(name, frozenset({name, f"chat/{name}"}))
        assert caller.find_limits(model).keys() == {"*", "key:own"}
    assert not replace(caller, limits={"key:other": RateLimit()}).needs_listed_models


async def test_a_model_is_retrieved_by_every_name_that_a_request_may_have(served: Served) -> None:
    """Create and retrieve agree, and so do the names in both of their refusals."""
    async with client_of(served, "reading") as client:
        for name in (*NAMES, "twin/dear"):
            assert (await client.models.retrieve(name)).id == name
    async with serving({**ROUTER, "default": None}) as strict:
        bodies: list[Any] = []
        for call in (strict.client.models.retrieve("nothing"), ROUTES["chat"](strict.client, "nothing")):
            with pytest.raises(NotFoundError) as refusal:
                await call
            bodies.append(refusal.value.body)
        assert bodies[0] == bodies[1]
        assert bodies[0]["message"].endswith("This server has: alias, cheap, dear, twin/dear.")
