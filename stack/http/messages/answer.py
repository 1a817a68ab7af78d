"""From a response to a message: its blocks, the reason of its end, and its usage."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from openai.types.responses import (
    Response,
    ResponseCodeInterpreterToolCall,
    ResponseContainerReference,
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseFunctionWebSearch,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
)

from stack.http.messages.conversion import MessageForm
from stack.http.messages.json_text import parse_input
from stack.http.messages.server_tools import ServerBlocks, tool_name
from stack.http.messages.tools import WEB_FETCH, WEB_SEARCH

Block = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence", "refusal", "model_context_window_exceeded"]
PART_BREAK: Final = "\n\n"
"""It stands between two parts of one reasoning."""


def message_id(response_id: str, form: MessageForm) -> str:
    """Return the id of the message that is made of a response."""
    plain = f"msg_{response_id.removeprefix('resp_')}"
    return form.fingerprint.add_to(plain) if form.fingerprint else plain


def build_message(response: Response, form: MessageForm) -> dict[str, Any]:
    """Return a whole message."""
    server_blocks = ServerBlocks(form.tool_names)
    content = [block for item in response.output for block in _build_blocks(item, form, server_blocks)]
    return {
        **begin_message(response, form),
        "content": content,
        **build_stop(response, form),
        "usage": build_usage(response, form),
    }


def begin_message(response: Response, form: MessageForm) -> dict[str, Any]:
    """Return a message without content, whose usage is an estimate."""
    return {
        "id": message_id(response.id, form),
        "type": "message",
        "role": "assistant",
        "model": form.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "container": None,
        "diagnostics": {"cache_miss_reason": form.cache_miss_reason} if form.cache_miss_reason else None,
        "usage": build_usage(response, form),
    }


def build_usage(response: Response, form: MessageForm) -> dict[str, Any]:
    """Return the usage of all calls of the model. Tokens from the cache are no part of `input_tokens`."""
    usage = response.usage
    if usage is None:
        counts = (form.input_tokens, 0, 0, 0)
    else:
        cached = usage.input_tokens_details.cached_tokens
        reasoning = usage.output_tokens_details.reasoning_tokens
        counts = (usage.input_tokens - cached, cached, usage.output_tokens, reasoning)
    calls = [tool_name(item) for item in response.output if isinstance(item, ResponseFunctionWebSearch)]
    requests = {f"{name}_requests": calls.count(name) for name in (WEB_SEARCH, WEB_FETCH)}
    return {
        "input_tokens": counts[0],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts[1],
        "output_tokens": counts[2],
        "output_tokens_details": {"thinking_tokens": counts[3]},
        "server_tool_use": requests if calls else None,
        "service_tier": "standard",
    }


def build_stop(response: Response, form: MessageForm) -> dict[str, Any]:
    """Return why a message ended, the stop sequence where that was the reason, and the container of its programs."""
    reason = find_stop_reason(response, form)
    sequence = _stop_sequence(response) if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence, "container": _find_container(response)}


def _find_container(response: Response) -> Block | None:
    """Return the container of a message's programs and the time until which it is there; None before the first one."""
    container_id, expires_at = None, None
    for item in response.output:
        match item:
            case ResponseCodeInterpreterToolCall():
                container_id = item.container_id
            case ResponseFunctionShellToolCall(environment=ResponseContainerReference() as environment):
                container_id = environment.container_id
            case _:
                pass
        expires_at = (item.model_extra or {}).get("container_expires_at", expires_at)
    if container_id is None or expires_at is None:
        return None
    return {"id": container_id, "expires_at": datetime.fromtimestamp(expires_at, UTC).isoformat()}


def find_stop_reason(response: Response, form: MessageForm) -> StopReason:
    """Return why a message ended. A client runs the calls of a message only if that is `tool_use`, so all whole calls
    count, whichever reason the engine has given."""
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    reason = response.incomplete_details.reason if response.incomplete_details else None
    if calls and calls[-1].status != "incomplete":
        return "tool_use"
    if reason == "max_output_tokens":
        used = response.usage.output_tokens if response.usage else form.max_tokens
        return "max_tokens" if used >= form.max_tokens else "model_context_window_exceeded"
    if reason == "content_filter" or _has_refusal(response):
        return "refusal"
    if _stop_sequence(response) is not None:
        return "stop_sequence"
    return "end_turn" if form.max_tokens else "max_tokens"


def _stop_sequence(response: Response) -> str | None:
    return (response.model_extra or {}).get("stop_sequence")


def _has_refusal(response: Response) -> bool:
    messages = [item for item in response.output if isinstance(item, ResponseOutputMessage)]
    return any(isinstance(part, ResponseOutputRefusal) for item in messages for part in item.content)


def _build_blocks(item: Any, form: MessageForm, server_blocks: ServerBlocks) -> Iterator[Block]:
    match item:
        case ResponseReasoningItem():
            if form.shows_thinking:
                thinking = "" if form.omits_thinking else join_reasoning(item)
                yield {"type": "thinking", "thinking": thinking, "signature": item.encrypted_content or ""}
        case ResponseOutputMessage():
            texts = [part.refusal if isinstance(part, ResponseOutputRefusal) else part.text for part in item.content]
            if text := "".join(texts):
                citations = [each for part in item.content for each in build_citations(part)]
                yield {"type": "text", "text": text, "citations": citations or None}
        case ResponseFunctionToolCall():
            name = form.tool_names.restore(item.name)
            yield {"type": "tool_use", "id": item.call_id, "name": name, "input": parse_input(item.arguments)}
        case _:
            yield from server_blocks.build(item)


def join_reasoning(item: ResponseReasoningItem) -> str:
    """Return the text of reasoning; where that is hidden, its summary."""
    parts: Sequence[Any] = item.content or item.summary
    return PART_BREAK.join(part.text for part in parts)


def build_citations(part: Any) -> list[Block]:
    """Return the citations of web pages in a part of a text."""
    if not isinstance(part, ResponseOutputText):
        return []
    return [build_citation(annotation.model_dump()) for annotation in part.annotations if _is_of_page(annotation)]


def _is_of_page(annotation: Any) -> bool:
    return annotation.type == "url_citation"


def build_citation(annotation: dict[str, Any]) -> Block:
    """Return a citation of a web page."""
    fields = {"url": annotation["url"], "title": annotation.get("title"), "cited_text": "", "encrypted_index": ""}
    return {"type": "web_search_result_location", **fields}
