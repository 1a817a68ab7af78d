"""The hosted code interpreter: Python in a container, run by the stack's ToolRuntime."""

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

from apis.chat import Function, FunctionTool, NativeTool, Tool
from apis.containers import Containers, NewContainer
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime
from apis.wire.tool_items import CodeInterpreterCallItem
from apis.wire.tools import CodeInterpreterTool
from providers.responses.events.output import Output
from providers.responses.events.tool_result import MadeFile
from providers.responses.tools.call import Events, HostedCall, TypedTool
from providers.responses.tools.code_interpreter.code_text import CodeText
from providers.responses.tools.tool_context import Setting

NAME: Final = "python"
_NEW: Final = "[this is a new Python session"
_ALL_GONE: Final = f"{_NEW}: the variables and files of the earlier calls are gone]\n"
_IMAGES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MAX_IMAGE_BYTES: Final = 4 * 1024 * 1024
"""Of one call, in its item. Larger ones are files of the container all the same."""
_MAX_LOOKED_FOR: Final = 10
"""Of the containers that a conversation names, the newest: each may be another process's to tell of."""
CodeStatus = Literal["in_progress", "interpreting", "completed", "failed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The container of a request's calls: what it is made of where it is not there yet, whether it never was, and
    whether the model has to be told that it is not the one of its earlier calls."""

    id: str
    new: NewContainer | None = None
    never_made: bool = False
    all_gone: bool = False


def make_code_interpreter(declared: CodeInterpreterTool, setting: Setting) -> TypedTool:
    """The interpreter of a request, where a Python tool is configured. Its `check` raises NotFound for an id of no
    container."""
    runtime = setting.runtime
    containers = runtime.containers() if runtime else None
    if runtime is None or containers is None or setting.spec(NAME) is None:
        raise setting.missing(
            "No code interpreter is configured: give the run config's `tool_runtime` the provider `python`."
        )
    return CodeInterpreter(declared, setting, runtime, containers)


async def _choose(declared: CodeInterpreterTool, setting: Setting, containers: Containers) -> _Chosen:
    """Raises NotFound, and another refusal of a container that the request names, naming the field."""
    asked = declared.container
    if isinstance(asked, str):
        try:
            await containers.get(asked, tenant=setting.tenant)
        except (NotFound, Unsupported) as exc:
            exc.param = f"{setting.param}.container"
            raise
        return _Chosen(asked)
    new = NewContainer(
        name="auto", file_ids=asked.file_ids, memory_limit=asked.memory_limit, network_policy=asked.network_policy
    )
    earlier = [item for item in reversed(setting.items) if isinstance(item, CodeInterpreterCallItem)]
    known = dict.fromkeys(item.container_id for item in earlier if item.container_id)
    for identity in islice(known, _MAX_LOOKED_FOR):
        # one that is out of reach is as good as gone
        with suppress(NotFound, Unsupported):
            await containers.get(identity, tenant=setting.tenant)
            return _Chosen(identity, new)
    ran = any(item.status == "completed" for item in earlier)
    return _Chosen(f"cntr_{secrets.token_hex(16)}", new, never_made=True, all_gone=ran)


class CodeInterpreter(TypedTool):
    """The interpreter as one request declared it. It has its container once it was checked."""

    _chosen: _Chosen

    def __init__(
        self, declared: CodeInterpreterTool, setting: Setting, runtime: ToolRuntime, containers: Containers
    ) -> None:
        self.shows_outputs = setting.includes("code_interpreter_call.outputs")
        self._declared = declared
        self._setting = setting
        self._runtime = runtime
        self._containers = containers
        self.copied: set[str] = set()
        self._native = NAME in setting.native
        self._tenant = setting.tenant
        self._making = asyncio.Lock()

    @property
    def container_id(self) -> str:
        return self._chosen.id

    async def check(self) -> None:
        chosen = await _choose(self._declared, self._setting, self._containers)
        for told in self._setting.told.values():
            state: Any = told.state
            if told.name.removeprefix("functions.") == NAME and state and state["container_id"] == chosen.id:
                self.copied |= {*state["file_ids"]}
        self._chosen = chosen
        if chosen.new is None:
            return
        try:
            await self._containers.check(chosen.new, tenant=self._tenant)
        except (Unsupported, NotFound, InvalidRequest) as exc:
            exc.param = f"{self._setting.param}.container.{exc.param}"
            raise

    @property
    def offered(self) -> Sequence[Tool]:
        if self._native:
            return [NativeTool(type=NAME)]
        spec = next(tool for tool in self._runtime.tools() if tool.name == NAME)
        parameters = cast(dict[str, Any], spec.parameters)
        return [FunctionTool(function=Function(name=NAME, description=spec.description, parameters=parameters))]

    def begin(self, start: ToolCallStart) -> HostedCall:
        return _Interpretation(self, start)

    async def run(self, call_id: str, code: str) -> ToolResult:
        """Run code in the container, which is made with the first call. Raises StackError where it cannot be run."""
        async with self._making:
            await self._make()
        call = ToolCall(call_id, NAME, {"code": code}, tenant=self._tenant, session=self.container_id)
        result = await self._runtime.call(call)
        if self._chosen.all_gone:
            self._chosen = replace(self._chosen, all_gone=False)
            if not result.text.startswith(_NEW):  # or else it says why, too
                return replace(result, text=_ALL_GONE + result.text)
        return result

    async def _make(self) -> None:
        """The container, and in it the files that the request names."""
        chosen, tenant = self._chosen, self._tenant
        named = (chosen.new.file_ids if chosen.new else None) or []
        if not chosen.never_made and await self._is_there():
            for file_id in named:
                if file_id not in self.copied:
                    await self._containers.copy_file(chosen.id, file_id, tenant=tenant)
        elif chosen.new is not None:
            await self._containers.create(chosen.new, tenant=tenant, container_id=chosen.id)
            self._chosen = replace(chosen, never_made=False, all_gone=chosen.all_gone or not chosen.never_made)
        self.copied |= {*named}

    async def _is_there(self) -> bool:
        """Raises NotFound where it was named, and nothing says how to make another."""
        try:
            await self._containers.get(self._chosen.id, tenant=self._tenant)
        except NotFound:
            if self._chosen.new is None:
                raise
            return False
        return True


class _Interpretation(HostedCall):
    prefix = "ci"

    def __init__(self, tool: CodeInterpreter, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._code = CodeText(raw=start.custom)
        self._code_told = False
        self._outputs: list[CodeOutput] = []

    def item(self, status: str) -> ResponseCodeInterpreterToolCall:
        ended = status not in ("in_progress", "interpreting")
        return ResponseCodeInterpreterToolCall(
            id=self.id,
            type="code_interpreter_call",
            status=cast(CodeStatus, status),
            code=self._code.code,
            container_id=self._tool.container_id,
            outputs=self._outputs if ended and self._tool.shows_outputs else None,
        )

    def open(self) -> Events:
        in_progress = ResponseCodeInterpreterCallInProgressEvent(
            type="response.code_interpreter_call.in_progress",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        return [*super().open(), in_progress]

    def append(self, text: str, events: Events) -> None:
        super().append(text, events)
        events += self._delta(self._code.feed(text))

    def close(self, status: str) -> Events:
        return [*self._tell_code(), *super().close(status)]

    async def run(self, output: Output) -> AsyncGenerator[Events]:
        rest = self._delta(self._code.end(self.text))
        interpreting = ResponseCodeInterpreterCallInterpretingEvent(
            type="response.code_interpreter_call.interpreting",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        yield [*rest, *self._tell_code(), interpreting]
        result = await self._tool.run(self.call_id, self._code.code)
        self._outputs = _shown(result, output)
        state = {"container_id": self._tool.container_id, "file_ids": sorted(self._tool.copied)}
        files = _made(result, self._tool.container_id)
        output.files.update(files)
        self.tell(result.text, state=state, files=files)
        completed = ResponseCodeInterpreterCallCompletedEvent(
            type="response.code_interpreter_call.completed",
            item_id=self.id,
            output_index=self.index,
            sequence_number=0,
        )
        yield [completed, *self.close("completed")]

    @property
    def text(self) -> str:
        """As the model is told it again: arguments that were forgiven are told as they should have been."""
        written = super().text
        if self.custom or not self._code_told:
            return written
        try:
            orjson.loads(written)
        except orjson.JSONDecodeError:
            return orjson.dumps({"code": self._code.code}).decode()
        return written

    def _delta(self, code: str) -> Events:
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

    def _tell_code(self) -> Events:
        """The code is whole, or as whole as it will be. Told once."""
        if self._code_told:
            return []
        self._code_told = True
        return [
            ResponseCodeInterpreterCallCodeDoneEvent(
                type="response.code_interpreter_call_code.done",
                item_id=self.id,
                output_index=self.index,
                code=self._code.code,
                sequence_number=0,
            )
        ]


def _made(result: ToolResult, container_id: str) -> dict[str, MadeFile]:
    """The files that the call wrote, by the paths that programs and models know them by."""
    data: Any = result.data or {}
    return {path: MadeFile(container_id, file_id) for path, file_id in data.get("files", {}).items()}


def _shown(result: ToolResult, output: Output) -> list[CodeOutput]:
    """What the item shows of a result: what was printed, and the images."""
    match result.data:
        case {"logs": str(logs), "exit": "ok" | "exception"}:
            text = logs
        case _:
            text = result.text  # it says how the session was ended
    shown: list[CodeOutput] = [OutputLogs(type="logs", logs=output.bound(text))] if text else []
    left = _MAX_IMAGE_BYTES
    for file in result.files:
        if file.media_type in _IMAGES and len(file.data) <= left:
            left -= len(file.data)
            data = base64.b64encode(file.data).decode()
            shown.append(OutputImage(type="image", url=f"data:{file.media_type};base64,{data}"))
    return shown
