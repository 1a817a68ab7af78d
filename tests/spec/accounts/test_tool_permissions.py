"""Hosted tools by all ways: in every spelling, from a prompt, from a chain or a conversation, and by their routes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, PermissionDeniedError

from apis.accounts.accounts import Caller
from apis.accounts.project_settings import HOSTED_TOOLS, ProjectSettings, find_hosted_tool
from apis.errors import PermissionDenied
from apis.wire.tools import Tool
from stack.http.route import RESPONSES, Route
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES
from tests.spec.accounts.test_stored_keys import new_key
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import SCRIPTED, Served, serving
from tests.support.tenants.accounts import stored_organization

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEARCH: Any = {"type": "web_search"}
PROMPTS: dict[str, Any] = {"searching": {"versions": {"1": {"instructions": "Hi.", "tools": [SEARCH]}}}}
CLIENT_TYPES = frozenset(
    {"function", "custom", "namespace", "apply_patch", "local_shell", "shell", "tool_search"}
    | {"computer", "computer_use_preview"}
)
"""Types of tools that run where the client is, or that run nothing."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(
        SCRIPTED,
        more={"accounts": {"provider": "stored"}, "files": {"provider": "kv"}},
        responses={"prompts": PROMPTS},
        tool_runtime={"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0},
    ) as running:
        yield running


@asynccontextmanager
async def client_of(
    served: Served, project: str, *scopes: str, settings: ProjectSettings | None = None
) -> AsyncGenerator[AsyncOpenAI]:
    """A client with a new key of a project, whose settings hold from its first request on."""
    organization = stored_organization(served.stack.accounts)
    key = await new_key(served, project, *scopes)
    if settings is not None:
        await organization.settings.change_settings(project, lambda _: settings, {})
    async with sdk_client(served.url, key.value) as client:
        yield client


def declared_types() -> set[str]:
    """The types of all tools that a request may declare."""
    union = get_args(Tool)[0]
    return {name for kind in get_args(union) for name in get_args(kind.model_fields["type"].annotation)}


async def test_every_type_of_a_tool_runs_at_the_client_or_can_be_closed() -> None:
    """S10 a: no type of a tool is forgotten, in none of its spellings."""
    types = declared_types()
    assert {name for name in types if find_hosted_tool(name) is None} == CLIENT_TYPES
    for name in types - CLIENT_TYPES:
        closed = find_hosted_tool(name)
        assert closed in HOSTED_TOOLS
        with pytest.raises(PermissionDenied):
            ProjectSettings(disabled_tools=(closed,)).require_tool(name, None, None)
    assert find_hosted_tool("shell", "container_auto") == find_hosted_tool("shell", "container_reference") is not None


async def test_a_key_without_the_right_to_vaults_has_no_request_that_names_them(served: Served) -> None:
    async with client_of(served, "vaultless", "responses", "api.agents.write") as client:
        beta: Any = client.beta.agents
        agent, none, ids = {"model": "scripted"}, {"type": "none"}, ["vault_1"]
        message = {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
        target = {"type": "new_session", "agent": agent, "environment": none, "input": [message], "vault_ids": ids}
        for refused in (
            client.responses.create(model="scripted", input="Hi.", extra_body={"vault_ids": ids}),
            beta.sessions.create(agent=agent, environment=none, input="Hi.", vault_ids=ids),
            beta.environments.create(environment={"type": "openai_hosted"}, vault_ids=ids),
            beta.automations.create(type="once", run_at=4_000_000_000, name="n", target=target),
        ):
            with pytest.raises(PermissionDeniedError, match=r"no api\.vaults\.read"):
                await refused


async def test_a_tool_that_is_closed_is_closed_in_every_spelling(served: Served) -> None:
    """S10 a: `browser_search` is the web search."""
    spellings = ("browser_search", "web_search", "web_search_preview", "web_search_2025_08_26")
    async with client_of(served, "spelt", settings=ProjectSettings(disabled_tools=("web_search",))) as client:
        for name in spellings:
            tool: Any = {"type": name}
            with pytest.raises(PermissionDeniedError) as refusal:
                await client.responses.create(model="scripted", input="hi", tools=[tool])
            assert (refusal.value.param, refusal.value.code) == ("tools[0]", "tool_not_allowed")
    async with client_of(served, "bound", "tool:web_search_preview") as client:
        for name in spellings:
            tool = {"type": name}
            assert (await client.responses.create(model="scripted", input="hi", tools=[tool])).status == "completed"


async def test_the_tools_of_a_prompt_are_those_of_its_request(served: Served) -> None:
    """S10 b: a prompt declares no tool that its caller may not use."""
    closed = ProjectSettings(disabled_tools=("web_search",))
    async with (
        client_of(served, "prompted", settings=closed) as project,
        client_of(served, "prompted-key", "tool:file_search") as key,
    ):
        for client in (project, key):
            ways: list[Any] = [{}, {"background": True}, {"store": False}]
            for fields in ways:
                with pytest.raises(PermissionDeniedError) as refusal:
                    await client.responses.create(model="scripted", prompt={"id": "searching"}, **fields)
                assert refusal.value.code == "tool_not_allowed"
            with pytest.raises(PermissionDeniedError):
                await client.responses.input_tokens.count(
                    model="scripted", input="hi", extra_body={"prompt": {"id": "searching"}}
                )
            async with talking(served, client) as talk:
                assert (await talk.refused(prompt={"id": "searching"})).status == 403


async def test_tools_that_a_chain_or_a_conversation_holds_are_checked_at_each_turn(served: Served) -> None:
    """S10 c: `additional_tools` of an earlier turn open nothing that is closed now."""
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [SEARCH]}
    async with client_of(served, "held") as free, client_of(served, "held", "tool:file_search") as bound:
        first = await free.responses.create(model="scripted", input=[added, {"role": "user", "content": "hi"}])
        conversation = await free.conversations.create(items=[added])
        before: list[Any] = [{"previous_response_id": first.id}, {"conversation": conversation.id}]
        ways: list[Any] = [{}, {"background": True}, {"stream": True}]
        for fields in before:
            for more in ways:
                with pytest.raises(PermissionDeniedError) as refusal:
                    await bound.responses.create(model="scripted", input="go on", **fields, **more)
                assert (refusal.value.param, refusal.value.code) == ("input", "tool_not_allowed")
            with pytest.raises(PermissionDeniedError):
                await bound.responses.input_tokens.count(model="scripted", input="go on", **fields)
            async with talking(served, bound) as talk:
                assert (await talk.refused(**fields)).status == 403
        with pytest.raises(PermissionDeniedError):
            await bound.responses.compact(model="scripted", previous_response_id=first.id)
        assert (await free.responses.create(model="scripted", input="x", previous_response_id=first.id)).output_text


async def test_the_routes_of_a_tool_are_closed_with_it(served: Served) -> None:
    """S10 d: who may run no code makes no container for it, and who may search no files searches none."""
    closed = ProjectSettings(disabled_tools=("code_interpreter", "file_search"))
    async with (
        client_of(served, "routes", settings=closed) as project,
        client_of(served, "routes-key", "tool:web_search") as key,
    ):
        for client in (project, key):
            for call in (
                client.containers.create(name="c"),
                client.containers.files.create("cntr_1", file=("a.txt", b"a")),
                client.vector_stores.search("vs_1", query="a"),
            ):
                with pytest.raises(PermissionDeniedError) as refusal:
                    await call
                assert refusal.value.code == "tool_not_allowed"


async def test_every_post_declares_whether_it_stores_content() -> None:
    """A new route cannot forget it, and skills and webhooks store as files do."""
    with pytest.raises(TypeError, match="declare"):
        Route("POST", "/new", RESPONSES, next(iter(API_ROUTES)).handler)
    storing = {route.path.split("/")[1] for route in (*API_ROUTES, *EXTENSION_ROUTES) if route.stores}
    assert storing == {
        *("agents", "batches", "containers", "conversations", "files", "skills", "traces", "uploads", "vaults"),
        *("vector_stores", "webhook_endpoints"),
    }
    caller = Caller("p", settings=ProjectSettings(retention_type="zero_data_retention"))
    for route in (*API_ROUTES, *EXTENSION_ROUTES):
        if route.stores:
            with pytest.raises(PermissionDenied, match="stores nothing"):
                route.require_access(caller)
        elif route.tool is None:
            route.require_access(caller)
