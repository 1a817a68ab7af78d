"""Render a chat request as the tokens that gpt-oss was trained on: Harmony's system, developer and conversation
messages."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime

from apis.chat import (
    AudioPart,
    ChatCustomTool,
    ChatFunctionTool,
    ChatJsonSchemaFormat,
    ChatRequest,
    ChatTool,
    ChatToolCall,
    ContentPart,
    CustomCall,
    FilePart,
    FunctionCall,
    ImagePart,
    Message,
    NativeTool,
    NativeToolName,
    RefusalPart,
    ResponseFormat,
    TextPart,
)
from apis.errors import InvalidRequest, Unsupported
from apis.wire.text_format import JsonObjectFormat, TextFormat
from providers.inference.chat_completions.body import VERBOSITY
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.token_cache import (
    JSON_CONTENT_TYPE,
    MessageKey,
    TokenCache,
    call_to_key,
    name_to_recipient,
    text_to_key,
)
from providers.inference.harmony.tools import declared_tools_to_text, native_tools_to_text
from providers.inference.harmony.vocabulary import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, Vocabulary

CHANNELS_NOTE = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
FUNCTIONS_CHANNEL_NOTE = "Calls to these tools must go to the commentary channel: 'functions'."


class Renderer:
    """Converts requests to prompts. A message is encoded once while it is in the token cache. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, options: HarmonyOptions, token_cache: TokenCache) -> None:
        self._vocabulary = vocabulary
        self._options = options
        self._token_cache = token_cache
        self._assistant_start = [START, *vocabulary.encode("assistant")]

    def render(self, request: ChatRequest, *, show_tools: bool = True) -> list[int]:
        """Return the prompt's ids, which end with `<|start|>assistant`: the output begins with its channel.

        Without `show_tools` the model does not see its tools; earlier calls stay. Raises Unsupported for images and
        files, InvalidRequest for a result without a call.
        """
        ids: list[int] = []
        for key in [*self._preface_keys(request, show_tools=show_tools), *conversation_to_keys(request)]:
            ids += self._encode_message(key)
        return ids + self._assistant_start

    def _preface_keys(self, request: ChatRequest, *, show_tools: bool) -> Iterator[MessageKey]:
        tools = (request.tools or []) if show_tools else []
        yield _plain_key("system", self._render_system_text(request, tools))
        leading = request.messages[: _count_instructions(request.messages)]
        texts = [content_to_text(message, index) for index, message in enumerate(leading)]
        instructions = "\n\n".join(filter(None, [*texts, VERBOSITY.get(request.verbosity)]))
        sections = [f"# Instructions\n\n{instructions}"] if instructions else []
        declared = declared_tools_to_text(tools)
        sections += [declared] if declared else []
        sections += _render_format_sections(request.response_format)
        if sections:
            yield _plain_key("developer", "\n\n".join(sections))

    def _render_system_text(self, request: ChatRequest, tools: Sequence[ChatTool]) -> str:
        options = self._options
        day = datetime.now(UTC).date() if options.current_date == "today" else options.current_date
        about = [
            *([options.identity] if options.identity is not None else []),
            *([f"Knowledge cutoff: {options.knowledge_cutoff}"] if options.knowledge_cutoff is not None else []),
            *([f"Current date: {day.isoformat()}"] if isinstance(day, date) else []),
        ]
        effort = f"Reasoning: {options.used_effort(request.reasoning_effort)}"
        channels = f"{CHANNELS_NOTE}\n{FUNCTIONS_CHANNEL_NOTE}" if any(map(_is_function, tools)) else CHANNELS_NOTE
        sections = ("\n".join(about), effort, native_tools_to_text(_native_tools(tools)), channels)
        return "\n\n".join(section for section in sections if section)

    def _encode_message(self, key: MessageKey) -> Sequence[int]:
        cached_ids = self._token_cache.get(key)
        if cached_ids is not None:
            return cached_ids
        encode = self._vocabulary.encode
        ids = [START, *encode(key.author)]
        if key.recipient is not None:
            ids += encode(f" to={key.recipient}")
        if key.channel is not None:
            ids += [CHANNEL, *encode(key.channel)]
        if key.content_type == JSON_CONTENT_TYPE:
            ids += [*encode(" "), CONSTRAIN, *encode("json")]
        elif key.content_type is not None:
            ids += encode(f" {key.content_type}")
        called = key.author == "assistant" and key.recipient is not None
        ids += [MESSAGE, *encode(key.text), CALL if called else END]
        self._token_cache.put(key, ids)
        return ids


# --- messages to keys ------------------------------------------------------------------------------------------------


def conversation_to_keys(request: ChatRequest) -> list[MessageKey]:
    """Return the keys of the messages after the leading instructions.

    The model was trained to see its analysis, and its calls of native tools there, only until its next final message;
    it sees all of it if the request says so.
    """
    messages = request.messages
    native = _native_tools(request.tools or [])
    preambles = _find_preambles(messages)
    calls_by_id: dict[str, MessageKey] = {}
    keys: list[MessageKey] = []
    answered = 0
    for index in range(_count_instructions(messages), len(messages)):
        message = messages[index]
        match message.role:
            case "assistant":
                text_keys = _text_keys(message, index, is_preamble=index in preambles)
                answered = len(keys) + len(text_keys) if any(key.channel == "final" for key in text_keys) else answered
                calls = [(call.id, _call_key(call, native)) for call in message.tool_calls or []]
                calls_by_id.update(calls)
                keys += [*text_keys, *(key for _, key in calls)]
            case "tool":
                keys.append(_result_key(message, index, calls_by_id))
            case "user":
                author = f"user:{_escape_header_word(message.name)}" if message.name else "user"
                keys.append(_plain_key(author, content_to_text(message, index)))
            case "system" | "developer":
                text = content_to_text(message, index)
                keys += [_plain_key("developer", f"# Instructions\n\n{text}")] if text else []
    if request.all_reasoning:
        return keys
    return [key for at, key in enumerate(keys) if at >= answered or key.channel != "analysis"]


def content_to_text(message: Message, index: int) -> str:
    """Return the text of a message; parts of an answer are concatenated, parts of other messages begin new lines.

    Raises Unsupported naming the first part that is an image or a file.
    """
    if not isinstance(message.content, list):
        return message.content if message.content is not None else message.refusal or ""
    texts = [_part_text(part, f"messages[{index}].content[{at}]") for at, part in enumerate(message.content)]
    return ("" if message.role == "assistant" else "\n").join(texts)


def _part_text(part: ContentPart, path: str) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ImagePart():
            raise Unsupported("Images are not supported by this model, which reads text only.", param=path)
        case AudioPart():
            raise Unsupported("Audio is not supported by this model, which reads text only.", param=path)
        case FilePart():
            raise Unsupported("Files are not supported by this model, which reads text only.", param=path)


def _text_keys(message: Message, index: int, *, is_preamble: bool) -> list[MessageKey]:
    keys = [text_to_key("analysis", message.reasoning)] if message.reasoning else []
    text = content_to_text(message, index)
    if text:
        spoken = message.phase == "commentary" or (message.phase is None and is_preamble)
        keys.append(text_to_key("commentary" if spoken else "final", text))
    return keys


def _call_key(call: ChatToolCall, native: frozenset[NativeToolName]) -> MessageKey:
    match call:
        case FunctionCall(function=function):
            return call_to_key(name_to_recipient(function.name, native), function.arguments, custom=False)
        case CustomCall(custom=custom):
            return call_to_key(name_to_recipient(custom.name, native), custom.input, custom=True)


def _result_key(message: Message, index: int, call_keys: Mapping[str, MessageKey]) -> MessageKey:
    call = call_keys.get(message.tool_call_id or "")
    if call is None or call.recipient is None:
        raise InvalidRequest(
            f"No tool call with the id '{message.tool_call_id}' comes before its result.",
            param=f"messages[{index}].tool_call_id",
        )
    return MessageKey(call.recipient, call.channel, "assistant", None, content_to_text(message, index))


def _plain_key(author: str, text: str) -> MessageKey:
    return MessageKey(author, None, None, None, text)


def _count_instructions(messages: Sequence[Message]) -> int:
    """Return the number of leading system and developer messages, which are the instructions."""
    return next(
        (at for at, message in enumerate(messages) if message.role not in {"system", "developer"}), len(messages)
    )


def _find_preambles(messages: Sequence[Message]) -> set[int]:
    """Return the indices of assistant messages that call a tool, or after which the assistant calls one.

    Clients without phases send the text before a call without a phase; rendered as an answer it would end the turn.
    """
    preambles: set[int] = set()
    calls_follow = False
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        calls_follow = message.role == "assistant" and (calls_follow or bool(message.tool_calls))
        if calls_follow:
            preambles.add(index)
    return preambles


def _native_tools(tools: Sequence[ChatTool]) -> frozenset[NativeToolName]:
    return frozenset(tool.type for tool in tools if isinstance(tool, NativeTool))


def _is_function(tool: ChatTool) -> bool:
    match tool:
        case ChatFunctionTool(function=function):
            return function.namespace in {None, "functions"}
        case ChatCustomTool():
            return True
        case NativeTool():
            return False


def _escape_header_word(text: str) -> str:
    """Escape blanks: a header is split at blanks, so a name with one could name another recipient."""
    return re.sub(r"\s", "_", text)


def _render_format_sections(response_format: ResponseFormat | None) -> list[str]:
    match response_format:
        case ChatJsonSchemaFormat(json_schema=form):
            about = "".join(f"// {line}\n" for line in (form.description or "").splitlines())
            schema = json.dumps(form.schema_, ensure_ascii=False, separators=(",", ":"))
            return ["# Response Formats", f"## {form.name}\n\n{about}{schema}"]
        case JsonObjectFormat():
            return ["# Response Formats", '## json\n\n// One JSON object and nothing else.\n{"type":"object"}']
        case TextFormat() | None:
            return []
