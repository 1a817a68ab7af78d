"""The official SDKs for JavaScript, installed from npm, with a stack as their server."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.programs import needs, npm_folder, run_program
from tests.support.servers.serving import scripted, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900, func_only=True), needs("npm")]

ANTHROPIC: Final = {"@anthropic-ai/sdk": "1.14.0"}
MESSAGES: Final = """
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "add", input_schema: { type: "object", properties: { a: { type: "integer" } } } }];
const request = { model: "scripted", max_tokens: 100, tools, messages: [{ role: "user", content: "Add." }] };
const events = [];
const stream = client.messages.stream(request).on("streamEvent", (event) => events.push(event.type));
const first = await stream.finalMessage();
const call = first.content.find((block) => block.type === "tool_use");
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "2" }] };
const messages = [...request.messages, { role: "assistant", content: first.content }, result];
const last = await client.messages.create({ ...request, messages });
const counted = await client.messages.countTokens({ model: "scripted", messages });
let refused = "";
try {
  await client.messages.create({ ...request, model: "nope" });
} catch (error) {
  refused = `${error.constructor.name} ${error.error.error.type}`;
}
const listed = (await client.models.list()).data.map((model) => model.id);
console.log(JSON.stringify({ first, last, counted, events, refused, listed }));
"""


async def output_of(script: str, folder: Path, url: str) -> Any:
    """Return the JSON that a script prints last."""
    path = folder / "script.mjs"
    path.write_text(script)
    output = await run_program("node", str(path), folder=folder, home=folder, environment={"URL": url})
    return json.loads(output.splitlines()[-1])


async def test_anthropics_sdk_streams_calls_counts_and_reads_errors() -> None:
    folder = npm_folder(ANTHROPIC)
    turn: Any = [{"reasoning": "I add."}, {"text": "Adding."}, {"call": "add", "arguments": ['{"a"', ": 1}"]}]
    async with serving(scripted(turn, [{"text": "It is 2."}])) as served:
        output = await output_of(MESSAGES, folder, served.url)
    thinking, text, call = output["first"]["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "I add.", "Adding.")
    assert thinking["signature"]
    assert (call["name"], call["input"], output["first"]["stop_reason"]) == ("add", {"a": 1}, "tool_use")
    assert (output["events"][0], output["events"][-1]) == ("message_start", "message_stop")
    assert (output["last"]["content"][0]["text"], output["last"]["stop_reason"]) == ("It is 2.", "end_turn")
    assert output["counted"]["input_tokens"] > 0
    assert output["refused"] == "NotFoundError not_found_error"
    assert output["listed"] == ["scripted"]
