"""From the events of a response's stream to those of a message's stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from openai.types.responses import ResponseFunctionToolCall, ResponseFunctionWebSearch, ResponseReasoningItem

from apis.errors import Overloaded, StackError
from apis.events import INITIAL_EVENTS
from stack.http.messages.answer import (
    PART_BREAK,
    begin_message,
    build_citation,
    build_stop,
    build_usage,
    join_reasoning,
)
from stack.http.messages.conversion import MessageForm
from stack.http.messages.dialect import error_to_message_body
from stack.http.messages.json_text import to_json
from stack.http.messages.server_tools import build_server_blocks
from stack.http.streams import SHUTTING_DOWN_MESSAGE, EventStream

Json = dict[str, Any]


def _frame(event_type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event_type.encode(), to_json({"type": event_type, **fields}))


PING_FRAME: Final = _frame("ping")


class MessageStream(EventStream):
    """The stream of a message: it has pings while there is nothing to send, and no frame after its last event."""

    keep_alive_frame = PING_FRAME
    done_frame = b""
    shutdown_frame = _frame("error", error=error_to_message_body(Overloaded(SHUTTING_DOWN_MESSAGE))["error"])


@dataclass(slots=True)
class _OpenBlock:
    """A block that has begun. `part` is the part of its item that grew last, and `has_delta` is true once it grew."""

    index: int
    part: tuple[str, int] = ("", 0)
    has_delta: bool = False


class MessageEvents:
    """Makes the frames of one message's stream. Blocks are numbered as they begin; an item of a response is one block,
    and that of a hosted call two."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._has_begun = False
        self._block_count = 0
        self._open_blocks: dict[int, _OpenBlock] = {}
        """By the output index of their items."""
        self._handlers: Mapping[str, Callable[[Any], Iterator[bytes]]] = {
            **dict.fromkeys(INITIAL_EVENTS, self._begin),
            "response.output_item.added": self._add_item,
            "response.output_text.delta": self._add_text,
            "response.refusal.delta": self._add_text,
            "response.output_text.annotation.added": self._add_citation,
            "response.reasoning_text.delta": self._add_thinking,
            "response.reasoning_summary_text.delta": self._add_thinking,
            "response.function_call_arguments.delta": self._add_arguments,
            "response.output_item.done": self._end_item,
            "response.completed": self._end,
            "response.incomplete": self._end,
            "response.failed": self._fail,
        }

    def encode(self, events: Sequence[Any]) -> bytes:
        """Return the frames of a batch, which may be none."""
        handlers = self._handlers
        return b"".join(
            [frame for event in events if (handle := handlers.get(event.type)) is not None for frame in handle(event)]
        )

    def encode_error(self, error: StackError) -> bytes:
        """Return the last frames of a stream that failed: open blocks end, and so does the message."""
        frames = [_frame("content_block_stop", index=block.index) for block in self._open_blocks.values()]
        frames.append(_frame("error", error=error_to_message_body(error)["error"]))
        if self._has_begun:
            frames.append(_frame("message_stop"))
        return b"".join(frames)

    def _begin(self, event: Any) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield _frame("message_start", message=begin_message(event.response, self._form))

    def _open_block(self, output_index: int, block: Json) -> bytes:
        opened = self._open_blocks[output_index] = _OpenBlock(self._block_count)
        self._block_count += 1
        return _frame("content_block_start", index=opened.index, content_block=block)

    def _close_block(self, output_index: int) -> bytes:
        return _frame("content_block_stop", index=self._open_blocks.pop(output_index).index)

    def _grow(self, output_index: int, delta: Json) -> bytes:
        block = self._open_blocks[output_index]
        block.has_delta = True
        return _frame("content_block_delta", index=block.index, delta=delta)

    def _add_item(self, event: Any) -> Iterator[bytes]:
        # a call is shown at once; text and thinking wait for the first of it, because an empty block is refused later
        if isinstance(event.item, ResponseFunctionToolCall):
            name = self._form.tool_names.restore(event.item.name)
            block: Json = {"type": "tool_use", "id": event.item.call_id, "name": name, "input": {}}
            yield self._open_block(event.output_index, block)

    def _add_text(self, event: Any) -> Iterator[bytes]:
        if not event.delta:
            return
        yield from self._require_text_block(event.output_index)
        yield self._grow(event.output_index, {"type": "text_delta", "text": event.delta})

    def _add_citation(self, event: Any) -> Iterator[bytes]:
        annotation: Any = event.annotation
        if not isinstance(annotation, dict):
            annotation = annotation.model_dump()
        annotation = cast("Json", annotation)
        if annotation.get("type") == "url_citation":
            yield from self._require_text_block(event.output_index)
            yield self._grow(event.output_index, {"type": "citations_delta", "citation": build_citation(annotation)})

    def _require_text_block(self, output_index: int) -> Iterator[bytes]:
        if output_index not in self._open_blocks:
            yield self._open_block(output_index, {"type": "text", "text": ""})

    def _add_thinking(self, event: Any) -> Iterator[bytes]:
        if not self._form.shows_thinking or self._form.omits_thinking or not event.delta:
            return
        part = (event.type, getattr(event, "summary_index", None) or getattr(event, "content_index", None) or 0)
        block, text = self._open_blocks.get(event.output_index), event.delta
        if block is None:
            yield self._open_block(event.output_index, _empty_thinking())
            block = self._open_blocks[event.output_index]
        elif block.part[0] != part[0]:  # the summary of a text that was shown
            return
        elif block.part != part:
            text = f"{PART_BREAK}{text}"
        block.part = part
        yield self._grow(event.output_index, {"type": "thinking_delta", "thinking": text})

    def _add_arguments(self, event: Any) -> Iterator[bytes]:
        if event.delta and event.output_index in self._open_blocks:
            yield self._grow(event.output_index, {"type": "input_json_delta", "partial_json": event.delta})

    def _end_item(self, event: Any) -> Iterator[bytes]:
        index, item = event.output_index, event.item
        match item:
            case ResponseReasoningItem():
                yield from self._end_reasoning(index, item)
            case ResponseFunctionToolCall():
                if index in self._open_blocks and not self._open_blocks[index].has_delta:
                    yield self._grow(index, {"type": "input_json_delta", "partial_json": item.arguments})
            case ResponseFunctionWebSearch():
                for block in build_server_blocks(item):
                    yield from self._send_whole_block(index, block)
            case _:
                pass
        if index in self._open_blocks:
            yield self._close_block(index)

    def _end_reasoning(self, index: int, item: ResponseReasoningItem) -> Iterator[bytes]:
        if not self._form.shows_thinking:
            return
        if index not in self._open_blocks:
            yield self._open_block(index, _empty_thinking())
            if not self._form.omits_thinking and (text := join_reasoning(item)):
                yield self._grow(index, {"type": "thinking_delta", "thinking": text})
        yield self._grow(index, {"type": "signature_delta", "signature": item.encrypted_content or ""})

    def _send_whole_block(self, index: int, block: Json) -> Iterator[bytes]:
        if block["type"] != "server_tool_use":
            yield self._open_block(index, block)
        else:
            yield self._open_block(index, {**block, "input": {}})
            text = to_json(block["input"]).decode()
            yield self._grow(index, {"type": "input_json_delta", "partial_json": text})
        yield self._close_block(index)

    def _end(self, event: Any) -> Iterator[bytes]:
        for index in [*self._open_blocks]:
            yield self._close_block(index)
        usage = build_usage(event.response, self._form)
        yield _frame("message_delta", delta=build_stop(event.response, self._form), usage=usage)
        yield _frame("message_stop")

    def _fail(self, _event: Any) -> Iterator[bytes]:
        """Yield the end of the blocks of a failed message; the error follows, which `encode_error` writes."""
        for index in [*self._open_blocks]:
            yield self._close_block(index)


def _empty_thinking() -> Json:
    return {"type": "thinking", "thinking": "", "signature": ""}
