"""The hosted code interpreter: Python in a container, run by the stack's ToolRuntime."""

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
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

from apis.containers import Containers, NewContainer
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.inference import Function, FunctionTool, NativeTool, Tool, ToolCallStart
from apis.tool_items import CodeInterpreterCallItem
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime
from apis.tools import CodeInterpreterTool
from providers.responses.hosted.call import Events, HostedCall, TypedTool
from providers.responses.hosted.code_text import CodeText
from providers.responses.hosted.setting import Setting
from providers.responses.output import Output
from providers.responses.told import MadeFile

NAME: Final = "python"
_ALL_GONE: Final = "[this is a new Python session: the variables and files of the earlier calls are gone]\n"
_IMAGES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MAX_IMAGE_BYTES: Final = 4 * 1024 * 1024
"""Of one call, in its item. Larger ones are files of the container all the same."""
CodeStatus = Literal["in_progress", "interpreting", "completed", "failed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The container of a request's calls: what it is made of where it is not there yet, and whether the model has to
    be told that it is not the one of its earlier calls."""

    id: str
    new: NewContainer | None = None
    all_gone: bool = False


def make_code_interpreter(declared: CodeInterpreterTool, setting: Setting) -> TypedTool:
    """The interpreter of a request, where a Python tool is configured. Raises NotFound for an id of no container."""
    runtime = setting.runtime
    containers = runtime.containers() if runtime else None
    if runtime is None or containers is None or setting.spec(NAME) is None:
        raise setting.missing(
            "No code interpreter is configured: give the run config's `tool_runtime` the provider `python`."
        )
    return CodeInterpreter(_choose(declared, setting, containers), setting, runtime, containers)


def _choose(declared: CodeInterpreterTool, setting: Setting, containers: Containers) -> _Chosen:
    asked = declared.container
    if isinstance(asked, str):
        if not _is_alive(asked, setting, containers):
            raise NotFound(f"Container with id '{asked}' not found.", param=f"{setting.param}.container")
        return _Chosen(asked)
    new = NewContainer(
        name="auto", file_ids=asked.file_ids, memory_limit=asked.memory_limit, network_policy=asked.network_policy
    )
    earlier = [item for item in reversed(setting.items) if isinstance(item, CodeInterpreterCallItem)]
    for identity in dict.fromkeys(item.container_id for item in earlier):
        if identity and _is_alive(identity, setting, containers):
            return _Chosen(identity, new)
    ran = any(item.status == "completed" for item in earlier)
    return _Chosen(f"cntr_{secrets.token_hex(16)}", new, all_gone=ran)


def _is_alive(identity: str, setting: Setting, containers: Containers) -> bool:
    try:
        containers.get(identity, tenant=setting.tenant)
    except NotFound:
        return False
    return True


class CodeInterpreter(TypedTool):
    """The interpreter as one request declared it."""

    def __init__(self, chosen: _Chosen, setting: Setting, runtime: ToolRuntime, containers: Containers) -> None:
        self.container_id = chosen.id
        self.shows_outputs = setting.includes("code_interpreter_call.outputs")
        self._new = chosen.new
        self._named = (chosen.new.file_ids if chosen.new else None) or []
        self._all_gone = chosen.all_gone
        self.copied: set[str] = set()
        for told in setting.told.values():
            state: Any = told.state
            if told.name.removeprefix("functions.") == NAME and state and state["container_id"] == chosen.id:
                self.copied |= {*state["file_ids"]}
        self._native = NAME in setting.native
        self._tenant = setting.tenant
        self._param = setting.param
        self._runtime = runtime
        self._containers = containers
        self._making = asyncio.Lock()

    async def check(self) -> None:
        if self._new is None:
            return
        try:
            await self._containers.check(self._new, tenant=self._tenant)
        except (Unsupported, NotFound, InvalidRequest) as exc:
            exc.param = f"{self._param}.container.{exc.param}"
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
        if self._all_gone:
            self._all_gone = False
            return replace(result, text=_ALL_GONE + result.text)
        return result

    async def _make(self) -> None:
        """The container, and in it the files that the request names."""
        try:
            self._containers.get(self.container_id, tenant=self._tenant)
        except NotFound:
            if self._new is None:
                raise
            await self._containers.create(self._new, tenant=self._tenant, container_id=self.container_id)
        else:
            for file_id in self._named:
                if file_id not in self.copied:
                    await self._containers.copy_file(self.container_id, file_id, tenant=self._tenant)
        self.copied |= {*self._named}


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
