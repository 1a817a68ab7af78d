"""The hosted tool `programmatic_tool_calling`: a program is a product of whole numbers, such as `6 * 7`."""

import asyncio
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import orjson
from openai.types.responses.response_output_item import Program

from apis.chat import ChatFunctionTool, FunctionDefinition, NativeToolName
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import RESULT_UNAVAILABLE, Emit, HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.tool_context import ToolContext
from tests.support.toy_tool.wire import ProgramItem, ProgramTool

_NAME: Final = "program"
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
}


class Programs(TypedTool):
    """The tool as a request declares it."""

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        function = FunctionDefinition(name=_NAME, description="Multiplies numbers.", parameters=_PARAMETERS)
        return [ChatFunctionTool(function=function)]

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return ProgramCall(start)


class ProgramCall(HostedCall):
    """One program."""

    item_type = "program"
    opens = "when complete"

    def item(self, status: str) -> Program:
        fields = {"id": self.id, "type": self.item_type, "call_id": self.call_id, "fingerprint": ""}
        return Program.model_validate({**fields, "code": self._code(), "status": status})

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        factors = self._code().split("*")
        if factors == ["wait"]:
            await asyncio.sleep(60)
        if not all(factor.strip().isdecimal() for factor in factors):
            raise ToolFailed("A program multiplies whole numbers.")
        self.record_result(str(prod(map(int, factors))))

    def _code(self) -> str:
        code: Any = self.parse_arguments().get("code")
        return str(code)


def _create_tool(declaration: ProgramTool, context: ToolContext) -> TypedTool:
    return Programs()


def _call_from_item(item: ProgramItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    return ToolResultRecord(item.call_id, _NAME, orjson.dumps({"code": item.code}).decode(), RESULT_UNAVAILABLE)


PROGRAMS: Final = ToolFunctions(_create_tool, _call_from_item)
