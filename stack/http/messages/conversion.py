"""From a request of the Messages API to a request for a response that is not stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from apis.messages import CountMessageTokens, CreateMessage, TextBlock, Thinking
from apis.responses import CreateResponse
from apis.wire.base import Includable
from apis.wire.item_types import ITEM_TYPES
from apis.wire.tools import FunctionTool
from stack.http.messages.fingerprints import Fingerprint, find_miss_reason
from stack.http.messages.history import convert_messages, find_uploads
from stack.http.messages.json_text import to_json
from stack.http.messages.tools import ToolNames, convert_choice, convert_tools, list_loadable
from stack.http.parsing import validate_request

_BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Beginning of a system block of Claude Code. Its text differs in every request, and would spoil the prompt cache."""
_EFFORTS: Final[Mapping[str, str]] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The effort of reasoning for each of Anthropic's; none is above the highest that every reasoning model knows."""
_LOW_BUDGET: Final = 4096
_MEDIUM_BUDGET: Final = 16_384
_MAX_USER_CHARS: Final = 512
_CHARS_PER_TOKEN: Final = 4
_INTERNAL_FIELDS: Final = frozenset(
    f"{row.name}.{path}" for row in ITEM_TYPES.values() for path in row.included_fields
).difference(get_args(Includable))
"""Fields of items that a message shows in a form of its own, and that no other client can include."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Facts of a request on which the form of its answer depends. `shows_thinking` is false where the client has
    switched it off, and `omits_thinking` true where it wants the signatures alone. `input_tokens` is an estimate.
    `fingerprint` is that of the prompt where the client asks for diagnostics, and `cache_miss_reason` their result."""

    model: str
    tool_names: ToolNames
    max_tokens: int
    shows_thinking: bool
    omits_thinking: bool
    input_tokens: int
    fingerprint: Fingerprint | None = None
    cache_miss_reason: Mapping[str, Any] | None = None


def build_form(message: CreateMessage, request: CreateResponse) -> MessageForm:
    """Return the form of the answer to a message."""
    thinking, input_tokens = message.thinking, _estimate_input(request)
    fingerprint = Fingerprint.of(message, request.instructions or "", input_tokens) if message.diagnostics else None
    return MessageForm(
        message.model,
        ToolNames(message.tools or ()),
        message.max_tokens,
        shows_thinking=thinking is None or thinking.type != "disabled",
        omits_thinking=thinking is not None and thinking.display == "omitted",
        input_tokens=input_tokens,
        fingerprint=fingerprint,
        cache_miss_reason=find_miss_reason(message, fingerprint) if fingerprint else None,
    )


def convert_count(message: CountMessageTokens) -> CreateResponse:
    """Return the request for the response whose prompt is counted. Raises InvalidRequest."""
    return validate_request(_convert_prompt(message), CreateResponse)


def convert_message(message: CreateMessage) -> CreateResponse:
    """Return the request for the response that becomes the message. Raises InvalidRequest."""
    fields = _convert_prompt(message)
    sampling = {name: getattr(message, name) for name in ("temperature", "top_p", "top_k")}
    fields |= {name: value for name, value in sampling.items() if value is not None}
    fields["stream"] = message.stream is True
    if message.stop_sequences:
        fields["stop"] = message.stop_sequences
    if message.service_tier == "standard_only":
        fields["service_tier"] = "default"
    user = message.metadata.user_id if message.metadata else None
    if user and len(user) <= _MAX_USER_CHARS:
        fields["user"] = user
    if message.max_tokens == 0:
        fields["prompt_cache_options"] = {"prewarm": True}
    request = validate_request(fields, CreateResponse)
    unchecked: dict[str, Any] = {"include": [*(request.include or ()), *_INTERNAL_FIELDS]} if request.tools else {}
    if message.max_tokens:  # which may be less than what a request for a response may name
        unchecked["max_output_tokens"] = message.max_tokens
    return request.model_copy(update=unchecked) if unchecked else request


def _convert_prompt(message: CountMessageTokens) -> dict[str, Any]:
    tools = convert_tools(message, find_uploads(message.messages))
    fields: dict[str, Any] = {
        "model": message.model,
        "input": convert_messages(message.messages, list_loadable(tools.get("tools", ()))),
        "store": False,
        **tools,
    }
    fields |= convert_choice(message.tool_choice, fields.get("tools", ()))
    if instructions := _convert_system(message.system):
        fields["instructions"] = instructions
    if (effort := _find_effort(message)) is not None:
        fields["reasoning"] = {"effort": effort}
    config = message.output_config
    text_format = (config and config.format) or message.output_format
    if text_format is not None:
        schema = {"type": "json_schema", "name": "answer", "schema": text_format.schema_, "strict": True}
        fields["text"] = {"format": schema}
    return fields


def _convert_system(system: str | Sequence[TextBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING_HEADER))


def _find_effort(message: CountMessageTokens) -> str | None:
    """Return the effort that a request asks for; None leaves it to the model."""
    effort = message.output_config and message.output_config.effort
    if effort and (message.thinking is None or message.thinking.type != "disabled"):
        return _EFFORTS[effort]
    return None if message.thinking is None else _effort_of_thinking(message.thinking)


def _effort_of_thinking(thinking: Thinking) -> str | None:
    if thinking.type == "disabled":
        return "none"
    if thinking.budget_tokens is None:
        return None
    if thinking.budget_tokens < _LOW_BUDGET:
        return "low"
    return "medium" if thinking.budget_tokens < _MEDIUM_BUDGET else "high"


def _estimate_input(request: CreateResponse) -> int:
    """Return an estimate of the tokens of a prompt from the texts in it."""
    chars = len(request.instructions or "")
    for tool in request.tools or ():
        if isinstance(tool, FunctionTool):
            chars += len(tool.description or "") + len(to_json(tool.parameters))
    for item in request.input if isinstance(request.input, list) else ():
        fields = vars(item)  # a model is slow to say that it has no such attribute
        chars += _count_chars(fields.get("content")) + _count_chars(fields.get("output"))
        chars += len(fields.get("arguments") or "")
    return max(1, chars // _CHARS_PER_TOKEN)


def _count_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    parts: list[dict[str, Any]] = [vars(part) for part in content or ()]
    return sum(len(part.get("text") or "") for part in parts)
