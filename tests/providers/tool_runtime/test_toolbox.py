"""Toolbox over real providers: each call goes where its tool is."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError

from apis.errors import ConfigError
from apis.tool_runtime import ToolCall, ToolRuntime
from providers.kv_store.memory import Memory
from providers.reader.child import ChildReader
from providers.skills.kv import StoredSkills
from providers.tool_runtime.browser.provider import Browser
from providers.tool_runtime.exa import Exa
from providers.tool_runtime.python.provider import Python
from providers.tool_runtime.searxng import SearXNG
from providers.tool_runtime.toolbox import Toolbox
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_exa import KEY, FakeExa
from tests.support.servers.fake_search import failure_of, search, started
from tests.support.servers.fetcher_hosts import Site, fetching


class Shop:
    """A search service and a site, and toolboxes over both."""

    def __init__(self, stack: AsyncExitStack, server: FakeExa, site: Site) -> None:
        self.stack, self.server, self.site = stack, server, site

    async def exa(self, key: str = KEY) -> ToolRuntime:
        config = Exa.Config.model_validate({"api_key": key, "base_url": self.server.url, "tool_timeout_s": 1})
        return await self.stack.enter_async_context(started(Exa(config)))

    async def browser(self) -> ToolRuntime:
        safe = await self.stack.enter_async_context(fetching([self.site.port]))
        browser = Browser(Browser.Config.model_validate({}), safe, ChildReader(ChildReader.Config(), None, safe))
        return await self.stack.enter_async_context(started(browser))

    async def toolbox(self, **providers: ToolRuntime) -> Toolbox:
        toolbox = Toolbox(Toolbox.Config(providers={name: {} for name in providers}), providers)
        await self.stack.enter_async_context(started(toolbox))
        return toolbox


@pytest.fixture
async def shop() -> AsyncGenerator[Shop]:
    async with AsyncExitStack() as stack, FakeExa() as server, Site() as site, stack:
        yield Shop(stack, server, site)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(shop: Shop, law: Callable[[Subject], Awaitable[None]]) -> None:
    toolbox = await shop.toolbox(exa=await shop.exa(), browser=await shop.browser())
    await law(Subject(toolbox, search(), search("hang"), shop.server.reached, shop.server.dropped))


async def test_a_call_goes_to_the_provider_that_has_the_tool(shop: Shop) -> None:
    toolbox = await shop.toolbox(browser=await shop.browser(), exa=await shop.exa())
    assert [tool.name for tool in toolbox.tools()] == ["open_page", "search"]
    url = shop.site.page("/", "<title>T</title><p>Text of the page.")
    opened = await toolbox.call(ToolCall("call_1", "open_page", {"url": url}))
    assert "Text of the page." in opened.text
    assert (await toolbox.call(search(context_size="low"))).sources
    assert shop.server.requests[0][1]["numResults"] == 5
    failure = await failure_of(toolbox, ToolCall("call_2", "nothing", {}))
    assert failure.message == "There is no such tool here. There are: open_page, search."


async def test_a_provider_without_tools_takes_no_part(shop: Shop) -> None:
    toolbox = await shop.toolbox(exa=await shop.exa(key=""))
    assert list(toolbox.tools()) == []
    assert (await failure_of(toolbox, search())).message == "There is no such tool here. There are: none."


async def test_two_tools_of_one_name_are_an_error_that_names_both_providers(shop: Shop) -> None:
    searxng = SearXNG(SearXNG.Config.model_validate({}))
    toolbox = Toolbox(Toolbox.Config(providers={"a": {}, "b": {}}), {"a": await shop.exa(), "b": searxng})
    with pytest.raises(ConfigError, match="'a' and 'b' both have a tool named 'search'"):
        await toolbox.start()
    await toolbox.close()


def test_a_toolbox_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError):
        Toolbox.Config(providers={})


async def test_the_containers_and_workspaces_of_a_toolbox_are_those_of_its_provider(shop: Shop) -> None:
    store = Memory(Memory.Config())
    python = Python(Python.Config.model_validate({}), None, store, StoredSkills(StoredSkills.Config(), store))
    toolbox = Toolbox(Toolbox.Config(providers={"exa": {}, "python": {}}), {"exa": await shop.exa(), "python": python})
    assert toolbox.containers() is python.containers()
    assert toolbox.workspaces() is python.workspaces()
    assert (await shop.toolbox(exa=await shop.exa())).workspaces() is None
