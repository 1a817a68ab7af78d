"""The turns of a response with tools that do something before the model's turn."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from openai.types.responses.response_output_item import McpApprovalRequest, McpCall, McpListTools

from apis.chat import ChatFunctionTool, FunctionDefinition, Message
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed, UpstreamError
from apis.responses import CreateResponse
from apis.sink import LastBatch, Stream
from apis.wire.items import InputMessage, Item, output_to_input
from apis.wire.tools import McpTool
from providers.inference.scripted import Scripted
from providers.responses.context.chat_request import build_chat
from providers.responses.context.conversation import Conversation
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.run import agent_loop
from providers.responses.run.agent_loop import AgentLoop
from providers.responses.run.checkpoint import Checkpoint, collect_tool_results
from providers.responses.settings import LoopSettings
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.tools.call import ClientCall, Emit, HostedCall, TypedTool
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.registry import ToolBinding

DECLARED = McpTool.model_validate({"type": "mcp", "server_label": "s"})
UNNAMED_CALL = ToolCallStart("", "")


class Listing(HostedCall):
    """Says that there is one tool, or fails."""

    item_type = "mcp_list_tools"

    def __init__(self, tool: "Server") -> None:
        super().__init__(UNNAMED_CALL)
        self._tool = tool

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        if self._tool.broken:
            raise ToolFailed("It is down.")
        self._tool.names_listed.append("add")

    def item(self, status: str) -> ResponseOutputItem:
        return McpListTools(id=self.id, type="mcp_list_tools", server_label="s", tools=[])


class Adding(HostedCall):
    item_type = "mcp_call"

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        self.record_result("3")

    def item(self, status: str) -> ResponseOutputItem:
        return McpCall.model_validate(
            {
                "id": self.id,
                "type": "mcp_call",
                "name": self.name,
                "server_label": "s",
                "arguments": self.text,
                "status": status,
            }
        )


class Asking(ClientCall):
    item_type = "mcp_approval_request"

    def validate_arguments(self) -> None:
        self.parse_arguments()
        self.record_result("")

    def item(self, status: str) -> ResponseOutputItem:
        return McpApprovalRequest(
            id=self.id, type="mcp_approval_request", name=self.name, server_label="s", arguments=self.text
        )


class Server(TypedTool):
    """A server whose tools are listed first; what was approved runs next, and other calls need approval."""

    def __init__(self, *approved: str, asks: bool = False, broken: bool = False) -> None:
        self.names_listed: list[str] = []
        self.broken = broken
        self._approved = approved
        self._asks = asks

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [ChatFunctionTool(function=FunctionDefinition(name=name)) for name in self.names_listed]

    def create_call(self, start: ToolCallStart) -> HostedCall | ClientCall:
        return Asking(start) if self._asks else Adding(start)

    def calls_before_turn(self, turn_index: int) -> Iterable[HostedCall]:
        if turn_index == 0:
            yield Listing(self)
            for identity in self._approved if self.names_listed else ():
                yield Adding(ToolCallStart(identity, "add"))


def turns_of(
    server: Server,
    *script: list[dict[str, Any]],
    checkpoint: Checkpoint | None = None,
    output_items: Sequence[ResponseOutputItem] = (),
    **fields: Any,
) -> tuple[AgentLoop, Scripted, ResponseOutput]:
    scripted = Scripted(Scripted.Config.model_validate({"turns": list(script)}))
    request = CreateResponse.model_validate({"model": "scripted", "input": "hi", **fields})
    conversation = Conversation(LoadedHistory(), [InputMessage(role="user", content="hi")], {}, None)
    output = ResponseOutput(ResponseIds(), items=output_items)
    toolbox = OfferedTools(request, [ToolBinding(DECLARED, server)])
    chat = build_chat(request, [Message(role="user", content="hi")], toolbox)
    config = LoopSettings.model_validate({"tool_timeout_s": 5, "continue_without_mcp_servers": True})
    loop = AgentLoop(config, scripted, chat, conversation, toolbox, output, checkpoint, max_calls=9)
    return loop, scripted, output


async def played(turns: AgentLoop, checkpoints: list[Checkpoint] | None = None) -> list[str]:
    """The types of all events; the checkpoints are added to the list."""
    on_checkpoint = None if checkpoints is None else checkpoints.append
    async with aclosing(Stream[ResponseStreamEvent](partial(turns.run, on_checkpoint=on_checkpoint))) as batches:
        return [event.type.removeprefix("response.") async for events in batches for event in events]


async def test_tools_are_listed_before_the_model_is_asked_and_then_offered() -> None:
    turns, scripted, output = turns_of(Server(), [{"call": "add"}], [{"text": "3."}], parallel_tool_calls=False)
    events = await played(turns)
    listing = ["mcp_list_tools.in_progress", "mcp_list_tools.completed"]
    assert events[:4] == ["output_item.added", *listing, "output_item.done"]
    assert [item.type for item in output.finished_items()] == ["mcp_list_tools", "mcp_call", "message"]
    assert [[tool.name for tool in chat.tools or ()] for chat in scripted.requests] == [["add"], ["add"]]
    assert scripted.requests[0].parallel_tool_calls is False
    assert [message.role for message in scripted.requests[1].messages] == ["user", "assistant", "tool"]


async def test_what_was_approved_is_run_before_the_model_is_asked() -> None:
    turns, scripted, output = turns_of(Server("c1", "c2"), [{"text": "3."}])
    await played(turns)
    assert [item.type for item in output.finished_items()] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert [message.tool_call_id for message in scripted.requests[0].messages][2:] == ["c1", "c2"]
    assert [result.output for result in turns.state.tool_results.values()] == ["3", "3"]


async def test_a_call_that_needs_approval_ends_the_response() -> None:
    turns, scripted, output = turns_of(Server(asks=True), [{"call": "add", "arguments": "{}", "id": "c1"}])
    await played(turns)
    assert [item.type for item in output.finished_items()] == ["mcp_list_tools", "mcp_approval_request"]
    assert len(scripted.requests) == 1
    assert [(result.call_id, result.name) for result in turns.state.tool_results.values()] == [("c1", "add")]


async def test_a_listing_that_fails_is_an_item_and_the_model_answers_all_the_same() -> None:
    turns, scripted, output = turns_of(Server(broken=True), [{"text": "Sorry."}])
    await played(turns)
    assert [item.type for item in output.finished_items()] == ["mcp_list_tools", "message"]
    assert scripted.requests[0].tools is None
    assert [message.role for message in scripted.requests[0].messages] == ["user"]


@pytest.mark.parametrize(
    "choice",
    [{"type": "mcp", "server_label": "s"}, {"type": "mcp", "server_label": "s", "name": "add"}],
)
async def test_a_choice_of_a_server_holds_once_its_tools_are_listed(choice: dict[str, str]) -> None:
    turns, scripted, _ = turns_of(Server(), [{"call": "add"}], [{"text": "3."}], tool_choice=choice)
    await played(turns)
    forced, free = (chat.tool_choice for chat in scripted.requests)
    assert forced is not None
    assert not isinstance(forced, str)
    assert forced.model_dump() == {"type": "function", "function": {"name": "add"}}
    assert free == "auto"


async def test_required_holds_once_the_tools_are_listed() -> None:
    turns, scripted, _ = turns_of(Server(), [{"call": "add"}], [{"text": "3."}], tool_choice="required")
    await played(turns)
    assert [chat.tool_choice for chat in scripted.requests] == ["required", "auto"]


async def test_a_call_that_was_required_in_vain_is_required_after_a_resume() -> None:
    turns, _, output = turns_of(Server(), [{"text": "No."}], [{"text": "No!"}], tool_choice="required")
    steps: list[Checkpoint] = []
    with pytest.raises(UpstreamError):
        await played(turns, steps)
    (step,) = [step for step in steps if step.turn == 1]
    listed = Server()
    listed.names_listed.append("add")
    step.tool_results = {}
    items = output.finished_items()[:2]
    later, scripted, _ = turns_of(
        listed, [{"text": "No!"}], checkpoint=step, output_items=items, tool_choice="required"
    )
    with pytest.raises(UpstreamError, match="asked twice"):
        await played(later)
    (chat,) = scripted.requests
    assert chat.tool_choice == "required"
    assert [message.role for message in chat.messages] == ["user", "assistant", "user"]


async def test_a_model_whose_calls_were_refused_gets_no_tools_after_a_resume() -> None:
    turns, _, output = turns_of(Server(), [{"call": "add"}])
    steps: list[Checkpoint] = []
    await played(turns, steps)
    last = steps[-1]
    assert (turns.incomplete_reason, last.turn, last.rejected_turn_count) == ("max_messages", 8, 3)
    listed = Server()
    listed.names_listed.append("add")
    last.tool_results = collect_tool_results(steps)
    later, scripted, _ = turns_of(listed, [{"call": "add"}], checkpoint=last, output_items=output.finished_items())
    await played(later)
    assert [chat.tools for chat in scripted.requests] == [None]
    assert later.incomplete_reason == "max_messages"


async def test_breaking_off_closes_a_listing_that_is_under_way() -> None:
    turns, _, output = turns_of(Server(), [{"text": "3."}])
    turning = asyncio.create_task(turns.run(LastBatch()))
    await asyncio.sleep(0)
    turning.cancel()
    await asyncio.wait({turning})
    closing = turns.close_open_items()
    assert [event.type for event in closing] == ["response.mcp_list_tools.failed", "response.output_item.done"]
    assert len(output.finished_items()) == 1


async def test_each_item_is_converted_once_for_all_turns_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work before a turn grows with the items that are new, not with the whole output."""
    converted: list[str | None] = []

    def convert(items: Iterable[ResponseOutputItem]) -> list[Item]:
        items = [*items]
        converted.extend(item.id for item in items)
        return output_to_input(items)

    monkeypatch.setattr(agent_loop, "output_to_input", convert)
    turns, scripted, output = turns_of(Server(), *([{"call": "add"}] for _ in range(5)), [{"text": "3."}])
    await played(turns)
    assert [len(chat.messages) for chat in scripted.requests] == [1, 3, 5, 7, 9, 11]
    assert converted == [item.id for item in output.finished_items()[:-1]]
