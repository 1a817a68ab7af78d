"""Files of messages in the container of the code interpreter, as at OpenAI."""

import base64
import json
import shutil

import pytest

from tests.spec.tools.test_code_interpreter import DONE, TOOL, Json, code, interpreting
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import chat_requests, create, messages
from tests.support.servers.fetcher_hosts import SITE, Site
from tests.support.servers.serving import Served

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
LIST: Script = [code("import os; {name: open(name).read() for name in sorted(os.listdir())}")]


def user(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": "Look."}]}]


def by_data(name: str, data: bytes) -> Json:
    file_data = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    return {"type": "input_file", "filename": name, "file_data": file_data}


def result(served: Served) -> str:
    return messages(served)[-1]["content"]


async def test_files_of_messages_are_in_the_container_under_their_names() -> None:
    """By id, by data and by URL."""
    async with Site() as site:
        url = site.page("/papers/far.txt", "three", "text/plain")
        fetcher = {"provider": "safe", "allowed_ports": [site.port], "allowed_private_networks": [f"{SITE}/32"]}
        more = {"files": {"provider": "kv"}, "fetcher": fetcher}
        async with interpreting(LIST, DONE, more=more) as served:
            await check_files_by_every_way(served, url)


async def check_files_by_every_way(served: Served, url: str) -> None:
    upload = await served.client.files.create(file=("up.csv", b"one"), purpose="user_data")
    parts = [
        {"type": "input_file", "file_id": upload.id},
        by_data("folder/data.csv", b"two"),
        {"type": "input_file", "file_url": url},
    ]
    await create(served, tools=[TOOL], input=user(*parts))
    assert result(served) == (
        "[files of the messages are in the current folder: data.csv, far.txt, up.csv]\n"
        "{'data.csv': 'two', 'far.txt': 'three', 'up.csv': 'one'}"
    )
    offered = [tool.model_dump() for tool in chat_requests(served)[0].tools or ()]
    assert "Files of the user's messages are in the current folder" in json.dumps(offered)


async def test_a_file_is_copied_once_and_a_later_turns_files_come_too() -> None:
    """The changes of a program to a file stay, over the turns of a chain."""
    turns: list[Script] = [[code("open('a.csv', 'a').write('!')")], DONE, LIST, DONE]
    async with interpreting(*turns) as served:
        first = await create(served, tools=[TOOL], input=user(by_data("a.csv", b"one")))
        await create(served, tools=[TOOL], input=user(by_data("b.csv", b"two")), previous_response_id=first.id)
        assert result(served).endswith("{'a.csv': 'one!', 'b.csv': 'two'}")
        assert "current folder: b.csv]" in result(served)


async def test_two_files_of_one_name_are_both_there_and_an_explicit_container_has_them_too() -> None:
    """Nothing is lost."""
    async with interpreting(LIST, DONE) as served:
        container = await served.client.containers.create(name="mine")
        tools = [{"type": "code_interpreter", "container": container.id}]
        await create(served, tools=tools, input=user(by_data("a.csv", b"one"), by_data("a.csv", b"two")))
        assert result(served).endswith("{'a-2.csv': 'two', 'a.csv': 'one'}")


async def test_a_file_that_does_not_fit_is_named_and_the_call_runs() -> None:
    """The model learns what is missing."""
    large = by_data("large.html", b"<p>x</p><!--" + b"x" * (2 << 20) + b"-->")
    async with interpreting([code("6 * 7")], DONE, python={"scratch_mib": 1}) as served:
        await create(served, tools=[TOOL], input=user(large, by_data("small.csv", b"1")))
        assert "could not be copied: large.html (The file could not be used: " in result(served)
        assert result(served).endswith("42")


async def test_without_files_the_model_gets_no_instructions_about_them() -> None:
    """The tool's description is the usual one."""
    async with interpreting([code("6 * 7")], DONE) as served:
        await create(served, tools=[TOOL])
        assert result(served) == "42"
        assert "user's messages" not in json.dumps([tool.model_dump() for tool in chat_requests(served)[0].tools or ()])
