"""The tiny gpt-oss with the tools that it was trained on, run for it by real providers, as an OpenAI client sees it."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from agents import (
    Agent,
    CodeInterpreterTool,
    FileSearchTool,
    HostedMCPTool,
    ModelSettings,
    OpenAIResponsesModel,
    WebSearchTool,
)
from aiohttp import web

from providers.fetcher.safe import GuardedFetcher
from tests.spec.responses.test_gpt_oss import section
from tests.spec.responses.test_gpt_oss_llama_cpp import section as llama_section
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import MODEL, PATIENCE_S
from tests.support.sdk.agents_sdk import outputs, streamed, whole
from tests.support.servers.fake_exa import KEY, FakeExa, page
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400, func_only=True)]

Json = dict[str, Any]
WEB_SEARCH: Final[Json] = {"type": "web_search"}
INTERPRETER: Final[Json] = {"type": "code_interpreter", "container": {"type": "auto"}}
CITIES: Final = urlsplit(known.PAGE_URL)
CALL_EVENTS: Final = ("web_search_call", "code_interpreter_call", "mcp_list_tools", "mcp_call", "file_search_call")


class NamingSafe(GuardedFetcher):
    """Safe, with the addresses of hosts in its config: the model is to see the same URLs in every run."""

    class Config(GuardedFetcher.Config):
        names: dict[str, str]

    def __init__(self, config: Config) -> None:
        async def resolve(host: str, port: int) -> Sequence[str]:
            return [config.names[host]]

        super().__init__(config, resolve)


@dataclass
class Tools:
    """A stack with every tool, what its search was asked, what was fetched, its MCP server, and a store of files."""

    served: Served
    exa: FakeExa
    fetched: list[str]
    mcp: Json
    store_id: str


@asynccontextmanager
async def cities(fetched: list[str]) -> AsyncGenerator[str]:
    """A site with the one page, on its port of some loopback address, which it gives."""

    async def answer(request: web.Request) -> web.Response:
        fetched.append(f"http://{request.host}{request.path}")
        return web.Response(text=known.PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get(CITIES.path, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        yield await _first_free(runner)
    finally:
        await runner.cleanup()


async def _first_free(runner: web.AppRunner) -> str:
    for last in range(2, 100):
        address = f"127.0.0.{last}"
        try:
            await web.TCPSite(runner, address, CITIES.port).start()
        except OSError:
            continue
        return address
    raise OSError(f"port {CITIES.port} is taken on all of the addresses")


def atlas() -> RealServer:
    real = RealServer()

    def population(city: str) -> str:
        return known.PEOPLE[city]

    about = known.ATLAS["description"]
    real.mcp.add_tool(population, description=about, structured_output=False)
    return real


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[section, pytest.param(llama_section, marks=pytest.mark.long)],
    ids=["gpt_oss", "llama_cpp"],
)
async def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Tools]:
    folder = tmp_path_factory.mktemp("files")
    inference = await asyncio.to_thread(request.param)
    fetched: list[str] = []
    async with AsyncExitStack() as stack:
        real = await stack.enter_async_context(atlas().serving())
        exa = await stack.enter_async_context(FakeExa())
        address = await stack.enter_async_context(cities(fetched))
        exa.results = [page(1, **known.FOUND)]
        providers: Json = {
            "search": {"provider": "exa", "api_key": KEY, "base_url": exa.url},
            "pages": {"provider": "browser"},
        }
        if shutil.which("bwrap"):
            providers["python"] = {"provider": "python", "timeout_s": 20}
        fetcher = {"provider": f"{__name__}:NamingSafe", "names": {CITIES.hostname: address}}
        reach = {"allowed_ports": [CITIES.port], "allowed_private_networks": [f"{address}/32"]}
        sections: Json = {
            "tool_runtime": {"provider": "toolbox", "providers": providers},
            "tool_servers": with_mcp(real.url),
            "fetcher": {**fetcher, **reach},
            "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
            "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
        }
        members: Json = {
            "own": inference,
            "embedding": {"provider": "tests.support.sdk.file_search_stack:Filing", "turns": []},
        }
        both = {"provider": "router", "providers": members}
        served = await stack.enter_async_context(serving(both, more=sections))
        store = await served.client.vector_stores.create()
        for name, text in known.LIBRARY.items():
            await served.client.vector_stores.files.upload_and_poll(
                vector_store_id=store.id, file=(name, text.encode()), poll_interval_ms=20
            )
        declared = {"server_label": "atlas", "server_url": real.url, "allowed_tools": ["population"]}
        mcp = {"type": "mcp", "require_approval": "never", **declared}
        yield Tools(served, exa, fetched, mcp, store.id)


async def ask(tools: Tools, question: str, tool: Json, previous: Any = None, **fields: Any) -> tuple[list[Any], Any]:
    """All events of a streamed response, and the response."""
    if previous is not None:
        fields["previous_response_id"] = previous.id
    create: Any = tools.served.client.responses.create
    stream = await create(
        model=MODEL,
        input=question,
        tools=[tool],
        temperature=0,
        max_output_tokens=300,
        stream=True,
        timeout=PATIENCE_S,
        **fields,
    )
    async with stream:
        events = [event async for event in stream]
    return events, events[-1].response


def thoughts(response: Any) -> list[str]:
    return [item.content[0].text for item in response.output if item.type == "reasoning"]


def thought(turn: known.ToolTurn) -> list[str]:
    return [*(use.thought for use in turn.uses), turn.result_thought]


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def stages(events: Sequence[Any]) -> list[str]:
    """The events of hosted calls in order, one for each run of deltas."""
    names = [event.type.removeprefix("response.") for event in events]
    names = [name for name in names if name.startswith(CALL_EVENTS)]
    return [name for at, name in enumerate(names) if name != names[at - 1] or not name.endswith("delta")]


async def test_it_searches_the_web_opens_what_it_found_and_cites_both(tools: Tools) -> None:
    turn, again = known.WEB
    tools.fetched.clear()
    events, response = await ask(tools, turn.question, WEB_SEARCH)
    assert response.status == "completed"
    assert thoughts(response) == thought(turn)
    assert kinds(response) == ["reasoning", "web_search_call"] * 2 + ["reasoning", "message"]
    search, opened = (item for item in response.output if item.type == "web_search_call")
    assert (search.status, search.action.type, search.action.query) == ("completed", "search", "people in Bergen")
    assert opened.action.to_dict() == {"type": "open_page", "url": known.PAGE_URL}
    assert [body["query"] for _, body in tools.exa.requests[-1:]] == ["people in Bergen"]
    assert stages(events) == [f"web_search_call.{stage}" for stage in ("in_progress", "searching", "completed")] * 2
    cites(events, response, turn, 2)

    events, second = await ask(tools, again.question, WEB_SEARCH, response)
    assert thoughts(second) == thought(again)
    assert kinds(second) == ["reasoning", "web_search_call", "reasoning", "message"]
    assert second.output[1].action.to_dict() == {"type": "open_page", "url": known.PAGE_URL}
    cites(events, second, again, 1)
    assert tools.fetched == [known.PAGE_URL]  # by its cursor, the page is the one that was opened before


def cites(events: Sequence[Any], response: Any, turn: known.ToolTurn, count: int) -> None:
    """The answer's marks have become links to the page, each with an annotation of exactly these characters."""
    part = response.output[-1].content[0]
    assert part.text == turn.answer_in_history
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == part.text
    links = [(each.url, part.text[each.start_index : each.end_index]) for each in part.annotations]
    assert links == [(known.PAGE_URL, known.CITED)] * count
    citations = [event.annotation for event in events if event.type == "response.output_text.annotation.added"]
    assert [each.to_dict() for each in citations] == [each.to_dict() for each in part.annotations]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_it_runs_python_and_what_it_computed_is_there_in_the_next_turn(tools: Tools) -> None:
    previous: Any = None
    containers: set[str] = set()
    for turn in known.SUM:
        events, response = await ask(
            tools, turn.question, INTERPRETER, previous, include=["code_interpreter_call.outputs"]
        )
        assert thoughts(response) == thought(turn)
        assert kinds(response) == ["reasoning", "code_interpreter_call", "reasoning", "message"]
        (use,), item = turn.uses, response.output[1]
        assert (item.status, item.code) == ("completed", use.call)
        assert [output.to_dict() for output in item.outputs] == [{"type": "logs", "logs": f"{use.result}\n"}]
        deltas = [event.delta for event in events if event.type == "response.code_interpreter_call_code.delta"]
        assert deltas
        assert "".join(deltas) == use.call
        assert stages(events) == [
            "code_interpreter_call.in_progress",
            "code_interpreter_call_code.delta",
            "code_interpreter_call_code.done",
            "code_interpreter_call.interpreting",
            "code_interpreter_call.completed",
        ]
        assert response.output_text == turn.answer
        containers.add(item.container_id)
        previous = response
    assert len(containers) == 1


async def test_it_calls_a_function_of_an_mcp_server_in_the_servers_namespace(tools: Tools) -> None:
    previous: Any = None
    for turn in known.POPULATION:
        events, response = await ask(tools, turn.question, tools.mcp, previous)
        listing = ["mcp_list_tools"] if previous is None else []
        assert thoughts(response) == thought(turn)
        assert kinds(response) == [*listing, "reasoning", "mcp_call", "reasoning", "message"]
        (use,), item = turn.uses, response.output[-3]
        assert (item.status, item.server_label, item.name) == ("completed", "atlas", "population")
        assert (item.arguments, item.output, item.error) == (use.call, use.result, None)
        deltas = [event.delta for event in events if event.type == "response.mcp_call_arguments.delta"]
        assert deltas
        assert "".join(deltas) == use.call
        assert stages(events) == [
            *(f"{name}.{stage}" for name in listing for stage in ("in_progress", "completed")),
            "mcp_call.in_progress",
            "mcp_call_arguments.delta",
            "mcp_call_arguments.done",
            "mcp_call.completed",
        ]
        if listing:
            assert [tool.name for tool in response.output[0].tools] == ["population"]
        assert response.output_text == turn.answer
        previous = response


async def test_it_searches_files_and_cites_what_it_found(tools: Tools) -> None:
    (turn,) = known.FILES
    declared = {"type": "file_search", "vector_store_ids": [tools.store_id]}
    events, response = await ask(tools, turn.question, declared, include=["file_search_call.results"])
    assert thoughts(response) == thought(turn)
    assert kinds(response) == ["reasoning", "file_search_call", "reasoning", "message"]
    item, part = response.output[1], response.output[-1].content[0]
    assert (item.status, item.queries) == ("completed", ["largest animal"])
    assert [result.text for result in item.results] == [*known.LIBRARY.values()]
    assert stages(events) == [f"file_search_call.{stage}" for stage in ("in_progress", "searching", "completed")]
    assert part.text == turn.answer_in_history
    assert [(each.type, each.filename, each.index) for each in part.annotations] == [
        ("file_citation", "whales.md", len(part.text) - 1)
    ]


AGENTS: Final[dict[str, tuple[known.ToolTurn, str]]] = {
    "web_search": (known.WEB[0], "web_search_call"),
    "code_interpreter": (known.SUM[0], "code_interpreter_call"),
    "mcp": (known.POPULATION[0], "mcp_call"),
    "file_search": (known.FILES[0], "file_search_call"),
}


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        pytest.param(name, streams, marks=[pytest.mark.long] if streams == number % 2 else [])
        for number, name in enumerate(AGENTS)
        for streams in (True, False)
    ],
)
async def test_an_agent_of_the_agents_sdk_is_answered_with_every_tool(name: str, streams: bool, tools: Tools) -> None:
    if name == "code_interpreter" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    turn, called = AGENTS[name]
    offered: dict[str, Any] = {
        "web_search": WebSearchTool(),
        "code_interpreter": CodeInterpreterTool(INTERPRETER),  # type: ignore[arg-type]  # as a plain dict
        "mcp": HostedMCPTool(tools.mcp),  # type: ignore[arg-type]  # likewise
        "file_search": FileSearchTool([tools.store_id]),
    }
    client = tools.served.client.with_options(timeout=PATIENCE_S)
    settings = ModelSettings(temperature=0, max_tokens=300)
    who = Agent("Tiny", model=OpenAIResponsesModel(MODEL, client), tools=[offered[name]], model_settings=settings)
    result = await (streamed if streams else whole)(who, turn.question)
    assert result.final_output == (turn.answer_in_history or turn.answer)
    assert outputs(result).count(called) == len(turn.uses)
