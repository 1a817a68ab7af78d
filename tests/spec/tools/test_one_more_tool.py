"""Law 8: a hosted tool is its file, its row and its line, besides the types of its declaration and its item.

A copy of the product gets a tool that it does not have. The server of that copy streams it, stores it and resumes it.
"""

import os
import shutil
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from providers.responses.run.checkpoint import LOST_CALL_MESSAGE
from tests.support.laws.source_trees import ROOT
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.client import sdk_client
from tests.support.servers.stack_process import running_stack
from tests.support.servers.upstream_server import UpstreamServer, call_chunks, stream, text_chunks

FILES: Final = {
    "tests/support/toy_tool/wire.py": "apis/wire/programs.py",
    "tests/support/toy_tool/tool.py": "providers/responses/tools/programs.py",
}
"""The files of the tool, and their places in the product."""
IMPORT: Final = "from apis.wire.programs import ProgramItem, ProgramTool\n"
LINES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "apis/wire/tools.py": (
        ("from apis.wire.image_tools", IMPORT),
        ("    | ComputerUsePreviewTool,", "    | ProgramTool\n"),
    ),
    "apis/wire/items.py": (
        ("from apis.wire.tool_items", IMPORT),
        ('    | Annotated[ItemReference, Tag("item_reference")]', '    | Annotated[ProgramItem, Tag("program")]\n'),
    ),
    "apis/wire/item_types.py": (
        ('    ItemType("message", "msg")', '    ItemType("program", "prog", call="hosted"),\n'),
    ),
    "providers/responses/tools/registry.py": (
        ("from providers.responses.events.response_object", IMPORT),
        ("    ToolType(ShellTool,", '    ToolType(ProgramTool, f"{_HERE}.programs:PROGRAMS", (ProgramItem,)),\n'),
    ),
}
"""The further changes for the tool: for each file, the lines before which lines are added, and those lines."""
TOOL: Final[Any] = {"type": "programmatic_tool_calling"}


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product, with the tool."""
    copy = tmp_path_factory.mktemp("product")
    for package in ("apis", "providers", "stack"):
        shutil.copytree(ROOT / package, copy / package)
    for source, target in FILES.items():
        text = (ROOT / source).read_text()
        (copy / target).write_text(text.replace("tests.support.toy_tool.wire", "apis.wire.programs"))
    for name, lines in LINES.items():
        text = (copy / name).read_text()
        for before, line in lines:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, line + before)
        (copy / name).write_text(text)
    return copy


@asynccontextmanager
async def served(product: Path, folder: Path, upstream: UpstreamServer) -> AsyncGenerator[tuple[Any, int]]:
    """A client of the product's server, on a store in the folder, and the process id of the server."""
    config = {
        "inference": {"provider": "vllm", "base_url": upstream.base_url},
        "kv_store": {"provider": "sqlite", "path": str(folder / "store.db")},
        "responses": {"provider": "loop", "background": {"lease_s": 1.5, "poll_s": 0.1}},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(product)}
    async with (
        running_stack(str(file), cwd=folder, environment=environment) as (url, process_id),
        sdk_client(url) as client,
    ):
        yield client, process_id


def program(code: str) -> list[Any]:
    """The answer of a model that calls the tool."""
    return stream(call_chunks("program", f'{{"code": "{code}"}}', call_id="c1"))


async def test_its_calls_are_streamed_stored_and_listed(product: Path, tmp_path: Path) -> None:
    answers = program("6 * 7"), stream(text_chunks("42")), stream(text_chunks("Yes."))
    async with UpstreamServer(*answers) as upstream, served(product, tmp_path, upstream) as (client, _):
        fields: Any = {"model": "fake-model", "tools": [TOOL]}
        events = [event async for event in await client.responses.create(**fields, input="hi", stream=True)]
        check_stream(events)
        first: Any = events[-1].response
        item, message = first.output
        assert (item.type, item.code, item.to_dict()["status"]) == ("program", "6 * 7", "completed")
        assert item.id.startswith("prog_")
        assert message.content[0].text == "42"
        assert first.tools[0].to_dict() == TOOL
        assert (await client.responses.retrieve(first.id)).output == first.output
        await client.responses.create(**fields, input="Sure?", previous_response_id=first.id)
        sent: Any = [{"role": "user", "content": "hi"}, *(each.to_dict() for each in first.output)]
        again: Any = await client.responses.create(**fields, input=[*sent, {"role": "user", "content": "Sure?"}])
        listed: Any = await client.responses.input_items.list(again.id, order="asc")
        assert [each.type for each in listed.data] == ["message", "program", "message", "message"]
        for received in upstream.received[-2:]:
            messages = received.json["messages"]
            assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant", "user"]
            assert messages[2]["content"] == "42"


async def test_a_call_whose_worker_is_killed_has_failed_and_the_response_goes_on(product: Path, tmp_path: Path) -> None:
    async with UpstreamServer(program("wait"), stream(text_chunks("It was lost."))) as upstream:
        async with served(product, tmp_path, upstream) as (client, process_id):
            queued = await client.responses.create(model="fake-model", input="hi", tools=[TOOL], background=True)
            async for event in await client.responses.retrieve(queued.id, stream=True):
                if event.type == "response.output_item.added":
                    break
            os.kill(process_id, signal.SIGKILL)
        async with served(product, tmp_path, upstream) as (client, _):
            events = [event async for event in await client.responses.retrieve(queued.id, stream=True)]
    check_stream(events)
    last: Any = events[-1]
    item, message = last.response.output
    assert (item.type, item.code, item.to_dict()["status"]) == ("program", "wait", "failed")
    assert message.content[0].text == "It was lost."
    assert LOST_CALL_MESSAGE in upstream.received[-1].json["messages"][-1]["content"]
