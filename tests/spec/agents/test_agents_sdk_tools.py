"""The Agents SDK's hosted tools, which the stack runs, and those of its tools that run where the agent is."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import (
    ApplyPatchTool,
    CodeInterpreterTool,
    CustomTool,
    FileSearchTool,
    HostedMCPTool,
    ImageGenerationTool,
    LocalShellCommandRequest,
    LocalShellTool,
    MCPToolApprovalFunctionResult,
    MCPToolApprovalRequest,
    ModelSettings,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellCommandRequest,
    ShellResult,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
    function_tool,
    tool_namespace,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from openai import BadRequestError
from openai.types.responses.tool_param import Mcp
from openai.types.responses.web_search_tool import Filters

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.inference import Model
from providers.inference.scripted import Scripted
from tests.support.models.hashing import DIMENSIONS, embed
from tests.support.sdk.agents_sdk import RUNS, Run, agent, outputs
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import messages
from tests.support.sdk.web_pages import browsing
from tests.support.servers.mcp_stack import offered, stacked, tool_outputs
from tests.support.servers.serving import scripted, serving

DONE: Script = [{"text": ["Do", "ne."]}]
both = pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])
SEALED = ModelSettings(store=False, response_include=["reasoning.encrypted_content"])
keeping = pytest.mark.parametrize("settings", [ModelSettings(), SEALED], ids=["stored", "not stored"])


class Librarian(Scripted):
    """A scripted model and one that embeds."""

    async def models(self) -> Sequence[Model]:
        return [*await super().models(), Model("hashing", "tests", embedding_dimensions=DIMENSIONS)]

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        return Embeddings([embed(str(text)) for text in request.inputs], 1)


# --- hosted tools -----------------------------------------------------------------------------------------------------


@both
@keeping
async def test_the_web_is_searched_and_cited(run: Run, settings: ModelSettings) -> None:
    turns: list[Script] = [
        [{"reasoning": "hm"}, call("web_search", '{"query": "rome"}')],
        [call("open_page", '{"page": "1"}')],
        [{"text": "See 【1†L0-L2】."}],
        DONE,
    ]
    async with browsing(*turns) as (served, there):
        who = agent(served, tools=[WebSearchTool(search_context_size="low")], model_settings=settings)
        result = await run(who)
        again = await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
    assert outputs(result) == ["reasoning", "web_search_call", "web_search_call", "message"]
    message: Any = result.raw_responses[-1].output[-1]
    assert message.content[0].annotations[0].url == f"{there.site.url}/rome"
    assert again.final_output == "Done."
    assert chat[0]["content"] == "hi"
    assert chat[-1]["content"] == "Sure?"


@both
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_code_is_run(run: Run) -> None:
    tool = CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})
    settings = ModelSettings(response_include=["code_interpreter_call.outputs"])
    turns: list[Script] = [[call("python", '{"code": "print(', '6 * 7)"}', id="c1")], DONE, DONE]
    async with serving(scripted(*turns), tool_runtime={"provider": "python", "timeout_s": 5}) as served:
        who = agent(served, tools=[tool], model_settings=settings)
        result = await run(who)
        assert tool_outputs(served) == {"c1": "42"}
        await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
    item: Any = result.raw_responses[0].output[0]
    assert (item.type, item.code, item.outputs[0].logs) == ("code_interpreter_call", "print(6 * 7)", "42\n")
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "assistant", "user"]


def hosted(url: str, approval: str, **fields: Any) -> HostedMCPTool:
    config: Mcp = {"type": "mcp", "server_label": "real", "server_url": url}
    config["require_approval"] = "always" if approval == "always" else "never"
    return HostedMCPTool(config, **fields)


@both
@keeping
async def test_tools_of_an_mcp_server_are_called(run: Run, settings: ModelSettings) -> None:
    async with stacked([call("real__note", '{"text":', ' "a"}', id="c1")], DONE, DONE) as (served, real):
        who = agent(served, tools=[hosted(real.url, "never")], model_settings=settings)
        result = await run(who)
        assert tool_outputs(served) == {"c1": "1 notes"}
        requests = len(real.methods)
        await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
        assert len(real.methods) == requests
    assert outputs(result) == ["mcp_list_tools", "mcp_call", "message"]
    assert real.notes == ["a"]
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "assistant", "user"]


@both
@keeping
@pytest.mark.parametrize("approve", [True, False], ids=["approved", "refused"])
async def test_a_call_of_an_mcp_server_waits_for_the_agents_leave(
    run: Run, settings: ModelSettings, approve: bool
) -> None:
    asked_for: list[Any] = []

    def decide(request: MCPToolApprovalRequest) -> MCPToolApprovalFunctionResult:
        asked_for.append((request.data.server_label, request.data.name, request.data.arguments))
        return {"approve": approve, "reason": "Because."}

    turns: list[Script] = [[{"reasoning": "hm"}, call("real__note", '{"text": "a"}', id="c1")], DONE]
    async with stacked(*turns) as (served, real):
        tool = hosted(real.url, "always", on_approval_request=decide)
        result = await run(agent(served, tools=[tool], model_settings=settings))
        chat = messages(served)
        (answer,) = tool_outputs(served).values()
    assert asked_for == [("real", "note", '{"text": "a"}')]
    assert result.final_output == "Done."
    assert [each["role"] for each in chat] == ["user", "assistant", "tool"]
    assert chat[1]["reasoning"] == "hm"
    assert real.notes == (["a"] if approve else [])
    assert ("1 notes" if approve else "Because.") in answer


@both
@pytest.mark.parametrize("approve", [True, False], ids=["approved", "refused"])
async def test_a_run_that_waits_for_leave_goes_on_where_it_was(run: Run, approve: bool) -> None:
    async with stacked([call("real__note", '{"text": "a"}', id="c1")], DONE) as (served, real):
        who = agent(served, tools=[hosted(real.url, "always")])
        first = await run(who)
        state = first.to_state()
        (waiting,) = first.interruptions
        if approve:
            state.approve(waiting)
        else:
            state.reject(waiting)
        result = await run(who, state)
        answer = tool_outputs(served)["c1"]
    assert result.final_output == "Done."
    assert real.notes == (["a"] if approve else [])
    assert ("1 notes" if approve else "did not approve") in answer


def allow(_: MCPToolApprovalRequest) -> MCPToolApprovalFunctionResult:
    return {"approve": True}


@both
async def test_leave_is_given_along_a_chain_of_responses(run: Run) -> None:
    async with stacked([call("real__note", '{"text": "a"}')], DONE) as (served, real):
        tool = hosted(real.url, "always", on_approval_request=allow)
        result = await run(agent(served, tools=[tool]), auto_previous_response_id=True)
    assert result.final_output == "Done."
    assert real.notes == ["a"]


@both
async def test_files_are_searched_and_cited(run: Run, tmp_path: Path) -> None:
    turns: list[Script] = [[call("file_search", '{"queries": ["krill"]}', id="c1")], [{"text": "Krill 【1】."}], DONE]
    sections = {
        "vector_index": {"provider": "sqlite_vec", "path": str(tmp_path / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }
    inference = {"provider": f"{__name__}:Librarian", "turns": turns}
    async with serving(inference, more=sections) as served:
        store = await served.client.vector_stores.create()
        await served.client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("whales.md", b"Whales eat krill."), poll_interval_ms=20
        )
        tool = FileSearchTool([store.id], max_num_results=3, include_search_results=True)
        who = agent(served, tools=[tool])
        result = await run(who)
        assert "Whales eat krill." in tool_outputs(served)["c1"]
        await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
    search: Any = result.raw_responses[0].output[0]
    message: Any = result.raw_responses[0].output[1]
    assert (search.type, search.queries, search.results[0].filename) == ("file_search_call", ["krill"], "whales.md")
    assert message.content[0].annotations[0].filename == "whales.md"
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "assistant", "user"]


@both
async def test_all_options_of_a_web_search_are_accepted(run: Run) -> None:
    tool = WebSearchTool(
        user_location={"type": "approximate", "city": "Rome", "country": "IT"},
        filters=Filters(allowed_domains=["example.com"]),
        search_context_size="high",
        external_web_access=True,
        search_content_types=["text", "image"],
        image_settings={"max_results": 2, "caption": True},
    )
    async with browsing([call("web_search", '{"query": "rome"}')], DONE) as (served, _):
        result = await run(agent(served, tools=[tool]))
    assert result.final_output == "Done."


@both
@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (ImageGenerationTool({"type": "image_generation"}), "tools[0].type"),
        (ShellTool(environment={"type": "container_auto"}), "tools[0].type"),
    ],
    ids=["images", "a shell of the server's"],
)
async def test_a_tool_that_the_server_has_not_is_refused(run: Run, tool: Any, param: str) -> None:
    async with serving(scripted(DONE)) as served:
        with pytest.raises(BadRequestError) as caught:
            await run(agent(served, tools=[tool]))
    assert caught.value.param == param


@both
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_shell_of_the_servers_is_used_and_the_agent_goes_on_with_what_it_wrote(run: Run) -> None:
    turns = [call("shell", '{"commands": ["echo 6 > x"]}', id="c1"), call("shell", '{"commands": ["cat x"]}', id="c2")]
    script = scripted([turns[0]], DONE, [turns[1]], DONE)
    async with serving(script, tool_runtime={"provider": "python"}) as served:
        who = agent(served, tools=[ShellTool(environment={"type": "container_auto"})])
        result = await run(who)
        again = await run(who, [*result.to_input_list(), {"role": "user", "content": "Again."}])
        assert tool_outputs(served)["c2"] == "6\n\nexit code 0"
    assert outputs(again) == ["shell_call", "shell_call_output", "message"]
    assert again.final_output == "Done."


# --- tools that run where the agent is --------------------------------------------------------------------------------


@both
@keeping
async def test_a_local_shell_is_used(run: Run, settings: ModelSettings) -> None:
    ran: list[list[str]] = []

    def execute(request: LocalShellCommandRequest) -> str:
        ran.append(request.data.action.command)
        return "a b"

    turns: list[Script] = [[{"reasoning": "hm"}, call("local_shell", '{"command": ["ls", "-l"]}', id="c1")], DONE]
    async with serving(scripted(*turns)) as served:
        result = await run(agent(served, tools=[LocalShellTool(execute)], model_settings=settings))
        assert tool_outputs(served) == {"c1": "a b"}
        assert messages(served)[1]["reasoning"] == "hm"
    assert ran == [["ls", "-l"]]
    assert result.final_output == "Done."


@both
@keeping
async def test_a_shell_is_used(run: Run, settings: ModelSettings) -> None:
    ran: list[list[str]] = []

    def execute(request: ShellCommandRequest) -> ShellResult:
        ran.append(request.data.action.commands)
        return ShellResult(
            [
                ShellCommandOutput("a b", "", ShellCallOutcome("exit", 0)),
                ShellCommandOutput("", "slow", ShellCallOutcome("timeout")),
            ]
        )

    turns: list[Script] = [[{"reasoning": "hm"}, call("shell", '{"commands": ["ls", "pwd"]}', id="c1")], DONE, DONE]
    async with serving(scripted(*turns)) as served:
        who = agent(served, tools=[ShellTool(execute)], model_settings=settings)
        result = await run(who)
        assert tool_outputs(served) == {"c1": "a b\nexit code 0\n\nstderr:\nslow\nstopped: it took too long"}
        await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
    assert ran == [["ls", "pwd"]]
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "assistant", "user"]
    assert chat[1]["reasoning"] == "hm"


@both
async def test_a_shell_that_waits_for_leave_is_used_once_it_has_it(run: Run) -> None:
    tool = ShellTool(lambda _: "a b", needs_approval=True)
    async with serving(scripted([call("shell", '{"commands": ["ls"]}', id="c1")], DONE)) as served:
        who = agent(served, tools=[tool])
        first = await run(who)
        state = first.to_state()
        state.approve(first.interruptions[0])
        result = await run(who, state)
        assert "a b" in tool_outputs(served)["c1"]
    assert result.final_output == "Done."


class Editor:
    """Keeps what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, str | None]] = []

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        self.done.append((operation.type, operation.path, operation.diff))
        return ApplyPatchResult("completed", f"Did {operation.path}.")

    update_file = delete_file = create_file


@both
@keeping
async def test_patches_are_applied(run: Run, settings: ModelSettings) -> None:
    editor = Editor()
    create = '{"type": "create_file", "path": "a.py", "diff": "+a"}'
    delete = '{"type": "delete_file", "path": "b.py"}'
    patches = [call("apply_patch", create, id="c1"), call("apply_patch", delete, id="c2")]
    async with serving(scripted([{"reasoning": "hm"}, {"calls": patches}], DONE, DONE)) as served:
        who = agent(served, tools=[ApplyPatchTool(editor)], model_settings=settings)
        result = await run(who)
        assert tool_outputs(served) == {"c1": "Did a.py.", "c2": "Did b.py."}
        await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        chat = messages(served)
    assert editor.done == [("create_file", "a.py", "+a"), ("delete_file", "b.py", None)]
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "tool", "assistant", "user"]


@both
async def test_a_custom_tool_is_called_with_free_text(run: Run) -> None:
    async def shout(_: Any, text: str) -> str:
        return text.upper()

    tool = CustomTool("shout", "Shouts.", shout)
    async with serving(scripted([call("shout", "a", " b", id="c1", custom=True)], DONE)) as served:
        result = await run(agent(served, tools=[tool]))
        assert tool_outputs(served) == {"c1": "A B"}
    assert result.final_output == "Done."


@function_tool(defer_loading=True)
def weather(city: str) -> str:
    """Return the weather."""
    return f"Rain in {city}."


@both
async def test_tools_of_a_namespace_that_are_searched_for_are_called(run: Run) -> None:
    tools = tool_namespace(name="world", description="The world.", tools=[weather])
    search: Script = [call("tool_search", '{"query": "weather"}', id="c0")]
    turns: list[Script] = [search, [call("world__weather", '{"city": "Oslo"}', id="c1")], DONE]
    async with serving(scripted(*turns)) as served:
        result = await run(agent(served, tools=[*tools, ToolSearchTool()]))
        assert offered(served) == ["world__weather"]
        assert tool_outputs(served)["c1"] == "Rain in Oslo."
    assert result.final_output == "Done."
