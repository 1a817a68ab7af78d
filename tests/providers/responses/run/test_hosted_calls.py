"""The time of a tool is its own: what a slow reader takes does not count."""

import asyncio

import pytest
from openai.types.responses import ResponseOutputItem
from openai.types.responses.response_output_item import McpCall

from apis.deltas import ToolCallStart
from apis.events import EventBatch
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.run.hosted_calls import run_hosted_calls
from providers.responses.settings import LoopSettings
from providers.responses.tools.call import Emit, HostedCall

LIMIT_S = 0.2


class Talking(HostedCall):
    """Puts two batches at once, and then works for `work_s`."""

    item_type = "mcp_call"
    work_s = 0.0

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await asyncio.gather(emit([]), emit([]))
        await asyncio.sleep(self.work_s)
        self.record_result("3")

    def item(self, status: str) -> ResponseOutputItem:
        return McpCall.model_validate(
            {"id": self.id, "type": "mcp_call", "name": "add", "server_label": "s", "arguments": "", "status": status}
        )


@pytest.mark.parametrize(("work_s", "result"), [(0, "3"), (5, "took longer than")])
async def test_a_slow_reader_does_not_use_up_the_time_of_a_tool(work_s: float, result: str) -> None:
    async def put(_: EventBatch) -> None:
        await asyncio.sleep(2 * LIMIT_S)

    output = ResponseOutput(ResponseIds())
    call = Talking(ToolCallStart("c1", "add"))
    call.work_s = work_s
    call.place(output)
    config = LoopSettings.model_validate({"tool_timeout_s": LIMIT_S})
    await run_hosted_calls([call], output, config, lambda _: None, put)
    assert call.tool_result is not None
    assert result in call.tool_result.output
