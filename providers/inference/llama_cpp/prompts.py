"""Prompts that small models follow with any chat template: calls and results as plain messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.chat import (
    AudioPart,
    ChatCustomTool,
    ChatRequest,
    ChatToolCall,
    ContentPart,
    FilePart,
    FunctionCall,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
)
from apis.errors import Unsupported
from providers.inference.chat_completions.body import VERBOSITY
from providers.inference.chat_completions.custom_tools import PlainTool

MAX_EXAMPLE_TOOLS: Final = 8
CHAT_EXAMPLES: Final = ("Hi, how are you?", "Write a haiku about spring.", "What is the largest planet?")
ANSWER_DESCRIPTION: Final = "Answer in words: greetings, thanks, jokes, writing, translation, general knowledge."


def describe_tool(tool: PlainTool) -> str:
    spec = tool.custom if isinstance(tool, ChatCustomTool) else tool.function
    return spec.description or spec.name.replace("_", " ").replace("-", " ")


def answer_choice_name(tools: Sequence[PlainTool]) -> str:
    """Return the name of the choice to answer; it never equals a tool's name."""
    return "answer" if "answer" not in {tool.name for tool in tools} else "answer in words"


def render_choice(name: str) -> str:
    """Return the text of a choice: the beginning of a call in JSON, up to the end of the name."""
    return f'{{"name": {json.dumps(name)}'


def check_input_parts(messages: Sequence[Message], *, takes_images: bool) -> None:
    """Raise Unsupported naming the first part that the model cannot read. An image is a data URL: the engine would
    fetch any other address by itself, past the rules for addresses."""
    for index, message in enumerate(messages):
        for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            param = f"messages[{index}].content[{at}]"
            if isinstance(part, FilePart):
                raise Unsupported("Files are not supported by this model, which reads text only.", param=param)
            if isinstance(part, AudioPart):
                raise Unsupported("Audio is not supported by this model, which hears nothing.", param=param)
            if isinstance(part, ImagePart) and not takes_images:
                raise Unsupported("Images are not supported by this model, which reads text only.", param=param)
            if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:"):
                raise Unsupported(
                    "This model's server takes an image only as a data URL with its content.", param=param
                )


def add_verbosity(request: ChatRequest) -> ChatRequest:
    """Return the request with an instruction line for its verbosity."""
    text = VERBOSITY.get(request.verbosity)
    if text is None:
        return request
    at = next((at for at, message in enumerate(request.messages) if message.role not in {"system", "developer"}), None)
    prompt = [*request.messages]
    prompt.insert(len(prompt) if at is None else at, Message(role="system", content=text))
    return request.model_copy(update={"messages": prompt})


# --- the three prompts -----------------------------------------------------------------------------------------------


def build_answer_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation for an answer in words. Calls are omitted, because small models imitate them."""
    transcript = _build_transcript(messages, show_calls=False)
    if messages[-1].role == "tool":
        transcript.append(Message(role="user", content="Use this to answer me."))
    return _merge_neighbours(transcript)


def build_decision_messages(
    messages: Sequence[Message], tools: Sequence[PlainTool], *, may_answer: bool
) -> list[Message]:
    """Return the conversation as a series of choices, ending before the next one."""
    answer_name = answer_choice_name(tools)
    specs = [{"name": answer_name, "description": ANSWER_DESCRIPTION}] if may_answer else []
    specs += [{"name": tool.name, "description": describe_tool(tool)} for tool in tools]
    rules = (
        "You are a helpful assistant with access to these functions:\n"
        + "\n".join(json.dumps(spec, ensure_ascii=False) for spec in specs)
        + '\nTo call one, reply with JSON: {"name": "function name", "arguments": {...}}'
    )
    shots: list[Message] = []
    if may_answer and len(tools) <= MAX_EXAMPLE_TOOLS:
        # Every tool appears once, and answering several times; otherwise small models call a tool for every "hello".
        pairs = [(text, answer_name) for text in CHAT_EXAMPLES]
        pairs += [(describe_tool(tool), tool.name) for tool in tools]
        for text, name in pairs:
            shots += [Message(role="user", content=text), Message(role="assistant", content=render_choice(name))]
    return _insert_rules(rules, shots, _build_transcript(messages, show_calls=True))


def build_argument_messages(
    messages: Sequence[Message], tool: PlainTool, schema: Mapping[str, Any] | None
) -> list[Message]:
    """Return the conversation with one tool's input as the reply to write. `schema` is None for free text."""
    spec: dict[str, Any] = {"name": tool.name, "description": describe_tool(tool)}
    if schema is not None:
        spec["parameters"] = schema
        instruction = "Reply with the JSON object of its arguments, taken from the user's message."
    else:
        instruction = "Reply with the text of its input and nothing else."
    if isinstance(tool, ChatCustomTool) and tool.custom.format is not None and tool.custom.format.type == "grammar":
        instruction += f"\nThe input must match this grammar:\n{tool.custom.format.grammar.definition}"
    listed = json.dumps(spec, ensure_ascii=False)
    rules = f"You are a helpful assistant with access to this function:\n{listed}\n{instruction}"
    return _insert_rules(rules, [], _build_transcript(messages, show_calls=False))


# --- the conversation ------------------------------------------------------------------------------------------------


def _insert_rules(rules: str, examples: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    leading = 0
    while leading < len(messages) and messages[leading].role == "system":
        leading += 1
    return _merge_neighbours(
        [*messages[:leading], Message(role="system", content=rules), *examples, *messages[leading:]]
    )


def _build_transcript(messages: Sequence[Message], *, show_calls: bool) -> list[Message]:
    calls: dict[str, ChatToolCall] = {}
    transcript: list[Message] = []
    for message in messages:
        text = message_text(message)
        if message.role == "tool":
            transcript.append(Message(role="user", content=_render_result(calls.get(message.tool_call_id or ""), text)))
            continue
        if content := _content_with_images(message, text):
            transcript.append(Message(role="system" if message.role == "developer" else message.role, content=content))
        for call in message.tool_calls or ():
            calls[call.id] = call
            if show_calls:
                transcript.append(Message(role="assistant", content=render_choice(_call_name_and_input(call)[0])))
    return transcript


def message_text(message: Message) -> str:
    """Return all text of a message."""
    if isinstance(message.content, str):
        return message.content
    parts = message.content or ()
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    texts += [part.refusal for part in parts if isinstance(part, RefusalPart)]
    return "\n".join(texts) or message.refusal or ""


def _content_with_images(message: Message, text: str) -> str | list[ContentPart]:
    """Return the message's text, or its text and images in order."""
    parts = message.content if isinstance(message.content, list) else []
    if not any(isinstance(part, ImagePart) for part in parts):
        return text
    return [part for part in parts if isinstance(part, TextPart | ImagePart)]


def _call_name_and_input(call: ChatToolCall) -> tuple[str, str]:
    if isinstance(call, FunctionCall):
        return call.function.name, call.function.arguments
    return call.custom.name, call.custom.input


def _render_result(call: ChatToolCall | None, text: str) -> str:
    name, arguments = _call_name_and_input(call) if call is not None else ("the function", "")
    return f"Result of {name}({arguments}):\n{text}"


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Merge neighbours of one role into one message: many templates require alternating roles."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(role=message.role, content=_join_contents(merged[-1], message))
        else:
            merged.append(message)
    return merged or [Message(role="user", content="")]


def _join_contents(one: Message, two: Message) -> str | list[ContentPart]:
    if isinstance(one.content, str) and isinstance(two.content, str):
        return f"{one.content}\n\n{two.content}"
    parts = [
        [TextPart(text=message.content)] if isinstance(message.content, str) else message.content or []
        for message in (one, two)
    ]
    return [*parts[0], TextPart(text="\n\n"), *parts[1]]


def calls_since_user(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return names and inputs of the calls since the last user message, with normalized JSON."""
    calls: list[tuple[str, str]] = []
    for message in messages:
        if message.role == "user":
            calls.clear()
        calls += [(name, normalize_json(text)) for name, text in map(_call_name_and_input, message.tool_calls or ())]
    return calls


def normalize_json(text: str) -> str:
    """Return equal JSON in one spelling; other text unchanged."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text
