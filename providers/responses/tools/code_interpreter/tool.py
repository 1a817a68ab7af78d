"""The hosted code interpreter: Python in a container, which the stack's ToolRuntime runs."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, cast

import orjson
from openai.types.responses import (
    ResponseCodeInterpreterToolCall,
)
from openai.types.responses.response_code_interpreter_tool_call import Output as CodeOutput
from openai.types.responses.response_code_interpreter_tool_call import OutputImage, OutputLogs

from apis.chat import ChatFunctionTool, ChatTool, FunctionDefinition, NativeTool, NativeToolName
from apis.containers import Containers, CreateContainer
from apis.deltas import ToolCallStart
from apis.events import EventList
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime
from apis.wire.items import Item
from apis.wire.tool_items import CodeInterpreterCallItem, CodeLogs
from apis.wire.tools import CodeInterpreterTool
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord
from providers.responses.tools.call import RESULT_UNAVAILABLE, Emit, HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.code_interpreter.code_text import CodeParser
from providers.responses.tools.container.request_container import (
    EarlierCall,
    RequestContainer,
)
from providers.responses.tools.shell.command_outputs import KILLED_EXIT_CODE
from providers.responses.tools.tool_context import ToolContext

PYTHON_NAME: Final = "python"
_NEW_SESSION_PREFIX: Final = "[this is a new Python session"
_STATE_LOST_NOTICE: Final = f"{_NEW_SESSION_PREFIX}: the variables and files of the earlier calls are gone]\n"
_IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MAX_IMAGE_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of images in the item of one call. Further images are only files of the container."""
_EXIT_CODES: Final = {"ok": 0, "exception": 1}
"""The exit codes that Python itself would have."""
CodeStatus = Literal["in_progress", "interpreting", "completed", "failed", "incomplete"]


def _create_tool(declaration: CodeInterpreterTool, context: ToolContext) -> TypedTool:
    runtime = context.runtime
    containers = runtime.containers() if runtime else None
    if runtime is None or containers is None or context.find_spec(PYTHON_NAME) is None:
        raise context.not_configured_error(
            "No code interpreter is configured: give the run config's `tool_runtime` the provider `python`."
        )
    return CodeInterpreter(declaration, context, runtime, containers)


def _read_call(item: Item) -> EarlierCall | None:
    if not isinstance(item, CodeInterpreterCallItem):
        return None
    return EarlierCall(item.container_id, has_run=item.status == "completed")


class CodeInterpreter(TypedTool):
    """The interpreter as one request declares it. `check_declaration` chooses its container."""

    def __init__(
        self, declaration: CodeInterpreterTool, context: ToolContext, runtime: ToolRuntime, containers: Containers
    ) -> None:
        self._context = context
        self._runtime = runtime
        self._is_native = PYTHON_NAME in context.native_tools
        declared = declaration.container
        new_or_id = (
            declared
            if isinstance(declared, str)
            else CreateContainer(
                name="auto",
                file_ids=declared.file_ids,
                memory_limit=declared.memory_limit,
                network_policy=declared.network_policy,
            )
        )
        self.container = RequestContainer(new_or_id, _read_call, context, containers, f"{context.param}.container")

    async def check_declaration(self) -> None:
        await self.container.check()

    @property
    def offered_tools(self) -> Sequence[ChatTool]:
        if self._is_native:
            return [NativeTool(type=PYTHON_NAME)]
        spec = next(tool for tool in self._runtime.tools() if tool.name == PYTHON_NAME)
        parameters = cast(dict[str, Any], spec.parameters)
        description = spec.description + self.container.description
        function = FunctionDefinition(name=PYTHON_NAME, description=description, parameters=parameters)
        return [ChatFunctionTool(function=function)]

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return _CodeInterpreterCall(self, start)

    async def run(self, call_id: str, code: str) -> ToolResult:
        """Run code in the container, which the first call creates. Raises StackError if it cannot run."""
        file_notice = await self.container.prepare()
        call = ToolCall(call_id, PYTHON_NAME, {"code": code}, tenant=self._context.tenant, session=self.container.id)
        result = await self._runtime.call(call)
        # otherwise the text already says so, with the reason
        is_notice_due = self.container.take_state_loss() and not result.text.startswith(_NEW_SESSION_PREFIX)
        notice = _STATE_LOST_NOTICE if is_notice_due else ""
        return replace(result, text=file_notice + notice + result.text)


class _CodeInterpreterCall(HostedCall):
    item_type = "code_interpreter_call"

    def __init__(self, tool: CodeInterpreter, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._code_parser = CodeParser(is_raw=start.custom)
        self._is_code_done = False
        self._outputs: list[CodeOutput] = []
        self._outcome: dict[str, Any] | None = None

    def item(self, status: str) -> ResponseCodeInterpreterToolCall:
        has_ended = status not in ("in_progress", "interpreting")
        return ResponseCodeInterpreterToolCall(
            id=self.id,
            type="code_interpreter_call",
            status=cast(CodeStatus, status),
            code=self._code_parser.code,
            container_id=self._tool.container.id,
            outputs=self._outputs if has_ended else None,
            **self._describe_end() if has_ended else {},
        )

    def _describe_end(self) -> dict[str, Any]:
        """Return the fields of the item that say how the program ended, and until when its container is there."""
        fields = {"outcome": self._outcome, "container_expires_at": self._tool.container.find_expiry()}
        return {name: value for name, value in fields.items() if value is not None}

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        events += self._code_delta(self._code_parser.feed(text))

    def close(self, status: str) -> EventList:
        return [*self._finish_code(), *super().close(status)]

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        last_delta = self._code_delta(self._code_parser.finish(self.text))
        await emit([*last_delta, *self._finish_code(), self.phase_event("interpreting")])
        result = await self._tool.run(self.call_id, self._code_parser.code)
        self._outputs = _build_outputs(result, output)
        self._outcome = _build_outcome(result)
        files = _written_files(result, self._tool.container.id)
        output.files.update(files)
        self.record_result(result.text, state=self._tool.container.state, files=files)

    @property
    def text(self) -> str:
        """The arguments as later turns show them to the model, with accepted invalid JSON as valid JSON."""
        written = super().text
        if self.is_custom or not self._is_code_done:
            return written
        try:
            orjson.loads(written)
        except orjson.JSONDecodeError:
            return orjson.dumps({"code": self._code_parser.code}).decode()
        return written

    def _code_delta(self, code: str) -> EventList:
        if not code:
            return []
        return [self.text_event("delta", delta=code)]

    def _finish_code(self) -> EventList:
        """Return the event that ends the code; none after the first time."""
        if self._is_code_done:
            return []
        self._is_code_done = True
        return [self.text_event("done", code=self._code_parser.code)]


def _written_files(result: ToolResult, container_id: str) -> dict[str, ContainerFile]:
    """Return the files that the call wrote, by their paths in the container."""
    data: Any = result.data or {}
    return {path: ContainerFile(container_id, file_id) for path, file_id in data.get("files", {}).items()}


def _build_outputs(result: ToolResult, output: ResponseOutput) -> list[CodeOutput]:
    """Return the printed text and the images of a result, for the item."""
    match result.data:
        case {"logs": str(logs), "exit": "ok" | "exception"}:
            text = logs
        case _:
            text = result.text  # says how the session ended
    outputs: list[CodeOutput] = [OutputLogs(type="logs", logs=output.truncate_text(text))] if text else []
    available_bytes = _MAX_IMAGE_BYTES
    for file in result.files:
        if file.media_type in _IMAGE_TYPES and len(file.data) <= available_bytes:
            available_bytes -= len(file.data)
            data = base64.b64encode(file.data).decode()
            outputs.append(OutputImage(type="image", url=f"data:{file.media_type};base64,{data}"))
    return outputs


def _build_outcome(result: ToolResult) -> dict[str, Any]:
    """Return how a program ended, in the form that the output of a shell command has."""
    data: Any = result.data or {}
    how = data.get("exit")
    if how == "timed_out":
        return {"type": "timeout"}
    return {"type": "exit", "exit_code": _EXIT_CODES.get(how, KILLED_EXIT_CODE)}


def _call_from_item(item: CodeInterpreterCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    if item.code is None or (item.outputs is None and item.status == "failed"):
        return None
    logs = "".join(output.logs for output in item.outputs or () if isinstance(output, CodeLogs))
    output = RESULT_UNAVAILABLE if item.outputs is None else logs or "(no output)"
    stored = ToolResultRecord(item.id or "", PYTHON_NAME, item.code, output, custom=True)
    return _call_for_model(item, stored, native_tools)


def _call_for_model(
    item: CodeInterpreterCallItem, stored: ToolResultRecord, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord:
    is_native = PYTHON_NAME in native_tools  # then the model writes its code without JSON around it
    if item.code is None or stored.custom == is_native:
        return stored
    arguments = item.code if is_native else orjson.dumps({"code": item.code}).decode()
    return replace(stored, name=PYTHON_NAME, arguments=arguments, custom=is_native)


CODE_INTERPRETER: Final = ToolFunctions(_create_tool, _call_from_item, call_for_model=_call_for_model)
