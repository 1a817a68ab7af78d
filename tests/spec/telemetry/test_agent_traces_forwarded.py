"""Agents' spans that are ingested reach the receiver of OTLP."""

from typing import Any

from tests.support.sdk.agent_traces import recorded_traces
from tests.support.servers.otlp_receiver import OtlpReceiver
from tests.support.servers.serving import serving

RECORDED: Any = recorded_traces()


async def test_the_spans_of_an_agent_are_sent_on_with_their_own_ids_and_times(otlp: OtlpReceiver) -> None:
    async with serving() as served:
        await served.client.post("/traces/ingest", cast_to=object, body=RECORDED)
    trace, *spans = RECORDED["data"]
    own = [span for span in otlp.spans if span.trace_id == trace["id"].removeprefix("trace_")]
    assert {span.span_id for span in own} == {span["id"][5:21] for span in spans}
    [root] = [span for span in own if not span.parent_id]
    assert root.name == "invoke_agent Tutor"
    assert {span.parent_id for span in own if span is not root} == {root.span_id}
