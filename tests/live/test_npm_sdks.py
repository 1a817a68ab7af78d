"""Anthropic's SDK for JavaScript and Vercel's AI SDK, installed from npm, with a stack as their server."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.programs import needs, npm_folder, run_program
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import messages
from tests.support.servers.mcp_stack import tool_outputs
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
AI: Final = {"ai": "6.0.326", "@ai-sdk/openai": "3.0.141", "zod": "4.6.7"}
STREAM: Final = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none" });
const model = openai("scripted");
const options = { store: false, forceReasoning: true, reasoningEffort: "low", reasoningSummary: "auto" };
const providerOptions = { openai: options };
const city = await generateObject({ model, schema: z.object({ name: z.string() }), prompt: "Which city?" });
const inputSchema = z.object({ a: z.number(), b: z.number() });
const add = tool({ inputSchema, execute: async ({ a, b }) => a + b });
const common = { model, tools: { add }, providerOptions, maxRetries: 0, onError: ({ error }) => { throw error; } };
const streamed = streamText({ ...common, prompt: "Add.", stopWhen: stepCountIs(3) });
const text = await streamed.text;
const steps = await streamed.steps;
const said = (await streamed.response).messages;
const user = (content) => ({ role: "user", content });
const again = streamText({ ...common, messages: [user("Add."), ...said, user("And now?")] });
const reasoning = steps[0].reasoningText;
const inputs = steps[0].toolCalls.map((call) => call.input);
console.log(JSON.stringify({ city: city.object, text, reasoning, inputs, again: await again.text }));
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


async def test_vercels_sdk_streams_calls_types_and_sends_reasoning_back() -> None:
    folder = npm_folder(AI)
    calls = {"calls": [call("add", '{"a": 1,', '"b": 2}', id="c1"), call("add", '{"a": 3,', '"b": 4}', id="c2")]}
    turns: list[Any] = [
        [{"text": '{"name": "Rome"}'}],
        [{"reasoning": "I add."}, {"text": "Adding."}, calls],
        [{"text": ["Do", "ne."]}],
        [{"text": "Still done."}],
    ]
    async with serving(scripted(*turns)) as served:
        output = await output_of(STREAM, folder, served.url)
        assert tool_outputs(served) == {"c1": "3", "c2": "7"}
        assert messages(served)[1]["reasoning"] == "I add."
    inputs = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    answers = {"text": "Done.", "reasoning": "I add.", "again": "Still done."}
    assert output == {"city": {"name": "Rome"}, "inputs": inputs, **answers}
