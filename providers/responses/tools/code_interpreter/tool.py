"""The hosted code interpreter: Python in a container, which the stack's ToolRuntime runs."""

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Literal, cast

import orjson
from openai.types.responses import (
    ResponseCodeInterpreterCallCodeDeltaEvent,
    ResponseCodeInterpreterCallCodeDoneEvent,
    ResponseCodeInterpreterCallCompletedEvent,
    ResponseCodeInterpreterCallInProgressEvent,
    ResponseCodeInterpreterCallInterpretingEvent,
    ResponseCodeInterpreterToolCall,
)
from openai.types.responses.response_code_interpreter_tool_call import Output as CodeOutput
from openai.types.responses.response_code_interpreter_tool_call import OutputImage, OutputLogs

from apis.chat import ChatFunctionTool, ChatTool, FunctionDefinition, NativeTool, NativeToolName
from apis.containers import Containers, CreateContainer
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.events import EventList
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime
from apis.wire.tool_items import CodeInterpreterCallItem, CodeLogs
from apis.wire.tools import CodeInterpreterTool
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord
from providers.responses.tools.call import RESULT_UNAVAILABLE, HostedCall, ToolType, TypedTool
from providers.responses.tools.code_interpreter.code_text import CodeParser
from providers.responses.tools.code_interpreter.message_files import (
    MessageFile,
    copy_message_files,
    find_message_files,
    has_message_files,
)
from providers.responses.tools.tool_context import ToolContext

PYTHON_NAME: Final = "python"
_NEW_SESSION_PREFIX: Final = "[this is a new Python session"
_STATE_LOST_NOTICE: Final = f"{_NEW_SESSION_PREFIX}: the variables and files of the earlier calls are gone]\n"
_MESSAGE_FILES_NOTICE: Final = " Files of the user's messages are in the current folder, /mnt/data, under their names."
_IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MAX_IMAGE_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of images in the item of one call. Further images are only files of the container."""
_MAX_CONTAINER_LOOKUPS: Final = 10
"""Maximum containers of a conversation that are looked up, newest first; each look-up may ask another process."""
CodeStatus = Literal["in_progress", "interpreting", "completed", "failed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _ContainerChoice:
    """The container of a request's calls.

    `new_container` creates it if it does not exist. `was_never_created` is true before its first call. `is_state_lost`
    is true if the model still has to learn that the state of its earlier calls is gone.
    """

    id: str
    new_container: CreateContainer | None = None
    was_never_created: bool = False
    is_state_lost: bool = False


def _create_tool(declaration: CodeInterpreterTool, context: ToolContext) -> TypedTool:
    runtime = context.runtime
    containers = runtime.containers() if runtime else None
    if runtime is None or containers is None or context.find_spec(PYTHON_NAME) is None:
        raise context.not_configured_error(
            "No code interpreter is configured: give the run config's `tool_runtime` the provider `python`."
        )
    return CodeInterpreter(declaration, context, runtime, containers)


async def _choose_container(
    declaration: CodeInterpreterTool, context: ToolContext, containers: Containers
) -> _ContainerChoice:
    """Return the container that the request names, the newest that still exists in its conversation, or a new one.
    Raises NotFound or Unsupported for a named container, with the field's name."""
    declared = declaration.container
    if isinstance(declared, str):
        try:
            await containers.get(declared, tenant=context.tenant)
        except (NotFound, Unsupported) as exc:
            exc.param = f"{context.param}.container"
            raise
        return _ContainerChoice(declared)
    new = CreateContainer(
        name="auto",
        file_ids=declared.file_ids,
        memory_limit=declared.memory_limit,
        network_policy=declared.network_policy,
    )
    earlier = [item for item in reversed(context.items) if isinstance(item, CodeInterpreterCallItem)]
    container_ids = dict.fromkeys(item.container_id for item in earlier if item.container_id)
    for container_id in islice(container_ids, _MAX_CONTAINER_LOOKUPS):
        # an unreachable container counts as deleted
        with suppress(NotFound, Unsupported):
            await containers.get(container_id, tenant=context.tenant)
            return _ContainerChoice(container_id, new)
    is_state_lost = any(item.status == "completed" for item in earlier)
    return _ContainerChoice(f"cntr_{secrets.token_hex(16)}", new, was_never_created=True, is_state_lost=is_state_lost)


class CodeInterpreter(TypedTool):
    """The interpreter as one request declares it. `check_declaration` chooses its container."""

    _container_choice: _ContainerChoice

    def __init__(
        self, declaration: CodeInterpreterTool, context: ToolContext, runtime: ToolRuntime, containers: Containers
    ) -> None:
        self._declaration = declaration
        self._context = context
        self._runtime = runtime
        self._containers = containers
        self.copied_file_ids: set[str] = set()
        self._is_native = PYTHON_NAME in context.native_tools
        self._tenant = context.tenant
        self._creation_lock = asyncio.Lock()
        self._message_files: Sequence[MessageFile] | None = None

    @property
    def container_id(self) -> str:
        return self._container_choice.id

    async def check_declaration(self) -> None:
        chosen = await _choose_container(self._declaration, self._context, self._containers)
        for tool_result in self._context.tool_results.values():
            state: Any = tool_result.state
            is_python = tool_result.name.removeprefix("functions.") == PYTHON_NAME
            if is_python and state and state["container_id"] == chosen.id:
                self.copied_file_ids |= {*state["file_ids"]}
        self._container_choice = chosen
        if chosen.new_container is None:
            return
        try:
            await self._containers.check(chosen.new_container, tenant=self._tenant)
        except (Unsupported, NotFound, InvalidRequest) as exc:
            exc.param = f"{self._context.param}.container.{exc.param}"
            raise

    @property
    def offered_tools(self) -> Sequence[ChatTool]:
        if self._is_native:
            return [NativeTool(type=PYTHON_NAME)]
        spec = next(tool for tool in self._runtime.tools() if tool.name == PYTHON_NAME)
        parameters = cast(dict[str, Any], spec.parameters)
        notice = _MESSAGE_FILES_NOTICE if has_message_files(self._context.items) else ""
        function = FunctionDefinition(name=PYTHON_NAME, description=spec.description + notice, parameters=parameters)
        return [ChatFunctionTool(function=function)]

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return _CodeInterpreterCall(self, start)

    async def run(self, call_id: str, code: str) -> ToolResult:
        """Run code in the container, which the first call creates. Raises StackError if it cannot run."""
        async with self._creation_lock:
            await self._prepare_container()
            files_notice = await self._copy_message_files()
        call = ToolCall(call_id, PYTHON_NAME, {"code": code}, tenant=self._tenant, session=self.container_id)
        result = await self._runtime.call(call)
        if self._container_choice.is_state_lost:
            self._container_choice = replace(self._container_choice, is_state_lost=False)
            if not result.text.startswith(_NEW_SESSION_PREFIX):  # otherwise the text already says so, with the reason
                result = replace(result, text=_STATE_LOST_NOTICE + result.text)
        return replace(result, text=files_notice + result.text)

    async def _prepare_container(self) -> None:
        """Create the container if necessary, and copy the files that the request names into it."""
        chosen, tenant = self._container_choice, self._tenant
        file_ids = (chosen.new_container.file_ids if chosen.new_container else None) or []
        if not chosen.was_never_created and await self._container_exists():
            for file_id in file_ids:
                if file_id not in self.copied_file_ids:
                    await self._containers.copy_file(chosen.id, file_id, tenant=tenant)
        elif chosen.new_container is not None:
            await self._containers.create(chosen.new_container, tenant=tenant, container_id=chosen.id)
            self.copied_file_ids.clear()
            self._container_choice = replace(
                chosen, was_never_created=False, is_state_lost=chosen.is_state_lost or not chosen.was_never_created
            )
        self.copied_file_ids |= {*file_ids}

    async def _copy_message_files(self) -> str:
        """Copy the files of the messages that are not there yet, and return a notice for the model, or ""."""
        if self._message_files is None:
            self._message_files = await asyncio.to_thread(find_message_files, self._context.items)
        files = [file for file in self._message_files if file.key not in self.copied_file_ids]
        notice = await copy_message_files(files, self._containers, self.container_id, tenant=self._tenant)
        self.copied_file_ids |= {file.key for file in files}
        return notice

    async def _container_exists(self) -> bool:
        """Return False for a container that can be replaced. Raises NotFound for one that the request names."""
        try:
            await self._containers.get(self._container_choice.id, tenant=self._tenant)
        except NotFound:
            if self._container_choice.new_container is None:
                raise
            return False
        return True


class _CodeInterpreterCall(HostedCall):
    item_type = "code_interpreter_call"

    def __init__(self, tool: CodeInterpreter, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._code_parser = CodeParser(is_raw=start.custom)
        self._is_code_done = False
        self._outputs: list[CodeOutput] = []

    def item(self, status: str) -> ResponseCodeInterpreterToolCall:
        has_ended = status not in ("in_progress", "interpreting")
        return ResponseCodeInterpreterToolCall(
            id=self.id,
            type="code_interpreter_call",
            status=cast(CodeStatus, status),
            code=self._code_parser.code,
            container_id=self._tool.container_id,
            outputs=self._outputs if has_ended else None,
        )

    def open(self) -> EventList:
        in_progress = ResponseCodeInterpreterCallInProgressEvent(
            type="response.code_interpreter_call.in_progress",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        return [*super().open(), in_progress]

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        events += self._code_delta(self._code_parser.feed(text))

    def close(self, status: str) -> EventList:
        return [*self._finish_code(), *super().close(status)]

    async def run(self, output: ResponseOutput) -> AsyncGenerator[EventList]:
        last_delta = self._code_delta(self._code_parser.finish(self.text))
        interpreting = ResponseCodeInterpreterCallInterpretingEvent(
            type="response.code_interpreter_call.interpreting",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        yield [*last_delta, *self._finish_code(), interpreting]
        result = await self._tool.run(self.call_id, self._code_parser.code)
        self._outputs = _build_outputs(result, output)
        state = {"container_id": self._tool.container_id, "file_ids": sorted(self._tool.copied_file_ids)}
        files = _written_files(result, self._tool.container_id)
        output.files.update(files)
        self.record_result(result.text, state=state, files=files)
        completed = ResponseCodeInterpreterCallCompletedEvent(
            type="response.code_interpreter_call.completed",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        yield [completed, *self.close("completed")]

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
        return [
            ResponseCodeInterpreterCallCodeDeltaEvent(
                type="response.code_interpreter_call_code.delta",
                item_id=self.id,
                output_index=self.index,
                delta=code,
                sequence_number=0,
            )
        ]

    def _finish_code(self) -> EventList:
        """Return the event that ends the code; none after the first time."""
        if self._is_code_done:
            return []
        self._is_code_done = True
        return [
            ResponseCodeInterpreterCallCodeDoneEvent(
                type="response.code_interpreter_call_code.done",
                item_id=self.id,
                output_index=self.index,
                code=self._code_parser.code,
                sequence_number=0,
            )
        ]


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


CODE_INTERPRETER: Final = ToolType(
    CodeInterpreterTool,
    _create_tool,
    (CodeInterpreterCallItem,),
    _call_from_item,
    call_for_model=_call_for_model,
    depends_on_model=True,
)
