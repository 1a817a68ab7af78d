"""Messages as strict chat templates take them: each step changes them for one thing that templates refuse.

No step loses a text: messages are joined in their order, and where a template knows no results of tools, they become
texts of the user that name the call. `refusals` has the table of which refusal leads to which step.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Final

from apis.chat import ChatToolCall, ContentPart, FunctionCall, Message, RefusalPart, TextPart
from providers.inference.chat_completions.body import is_instruction, join_text_parts

OPENING: Final = "(The conversation begins.)"
CONTINUATION: Final = "Continue."
NO_TEXT: Final = "(empty)"
_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")


class Step(Enum):
    """A change of a chat, named by what the server gets. The last one changes the body, not the messages."""

    SHORT_CALL_IDS = auto()
    TOOLS_AS_TEXT = auto()
    NO_INSTRUCTIONS = auto()
    INSTRUCTIONS_FIRST = auto()
    USER_FIRST = auto()
    ALTERNATING = auto()
    USER_LAST = auto()
    TEXT_CONTENT = auto()
    FILLED_CONTENT = auto()
    TEXT_FOR_NULL = auto()


IMPLIED: Final[Mapping[Step, frozenset[Step]]] = {
    Step.ALTERNATING: frozenset((Step.INSTRUCTIONS_FIRST, Step.USER_FIRST)),
    Step.NO_INSTRUCTIONS: frozenset((Step.ALTERNATING, Step.INSTRUCTIONS_FIRST, Step.USER_FIRST)),
}
"""Steps that another one takes with it: a template that refuses the one form refuses the other."""


def arrange_messages(messages: Sequence[Message], steps: Collection[Step]) -> list[Message]:
    """Return the messages after the steps, whose order is always the same."""
    arranged = [*messages]
    for step, change in _CHANGES.items():
        if step in steps:
            arranged = change(arranged)
    return arranged


# --- roles -----------------------------------------------------------------------------------------------------------


def _put_instructions_first(messages: list[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: not is_instruction(message))


def _put_instructions_into_user(messages: list[Message]) -> list[Message]:
    """Make the instructions the first message of the user, which is then joined with the one that follows."""
    texts = [join_text_parts(message) for message in messages if is_instruction(message)]
    if not texts:
        return messages
    preface = Message(role="user", content="\n\n".join(text for text in texts if text))
    return [preface, *(message for message in messages if not is_instruction(message))]


def _begin_with_user(messages: list[Message]) -> list[Message]:
    at = next((at for at, message in enumerate(messages) if not is_instruction(message)), len(messages))
    if at < len(messages) and messages[at].role == "user":
        return messages
    return [*messages[:at], Message(role="user", content=OPENING), *messages[at:]]


def _end_with_user(messages: list[Message]) -> list[Message]:
    if messages[-1].role != "assistant":
        return messages
    return [*messages, Message(role="user", content=CONTINUATION)]


def _join_neighbours(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role and message.role in ("user", "assistant"):
            joined[-1] = _join_messages(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _join_messages(first: Message, second: Message) -> Message:
    thoughts = "\n".join(text for text in (first.reasoning, second.reasoning) if text)
    content = _join_texts(first.content or "", second.content or "")
    return first.model_copy(
        update={
            "content": content if content is not None else [*_to_parts(first), *_to_parts(second)],
            "name": first.name if first.name == second.name else None,
            "reasoning": thoughts or None,
            "refusal": _join_texts(first.refusal or "", second.refusal or "") or None,
            "tool_calls": [*(first.tool_calls or ()), *(second.tool_calls or ())] or None,
        }
    )


def _join_texts(first: object, second: object) -> str | None:
    """Return two texts as one; None where one of them is no text."""
    if not (isinstance(first, str) and isinstance(second, str)):
        return None
    return "\n\n".join(text for text in (first, second) if text)


def _to_parts(message: Message) -> list[ContentPart]:
    content = message.content
    return content if isinstance(content, list) else [TextPart(text=content)] if content else []


# --- calls -----------------------------------------------------------------------------------------------------------


def _shorten_call_ids(messages: list[Message]) -> list[Message]:
    return [
        message.model_copy(
            update={
                "tool_call_id": message.tool_call_id and _shorten(message.tool_call_id),
                "tool_calls": message.tool_calls
                and [call.model_copy(update={"id": _shorten(call.id)}) for call in message.tool_calls],
            }
        )
        for message in messages
    ]


def _shorten(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _write_tools_as_text(messages: list[Message]) -> list[Message]:
    """Make each result a text of the user that names its call. A call without a result stays as a text, too."""
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    calls: dict[str, ChatToolCall] = {}
    written: list[Message] = []
    for message in messages:
        if message.role == "tool":
            call = calls.get(message.tool_call_id or "")
            title = TextPart(text=f"Result of {_describe_call(call) if call else 'a function'}:")
            written.append(Message(role="user", content=_join_lines([title, *_to_parts(message)])))
            continue
        calls |= {call.id: call for call in message.tool_calls or ()}
        if message.tool_calls:
            open_calls = [call for call in message.tool_calls if call.id not in answered]
            lines = [TextPart(text=f"Call without a result: {_describe_call(call)}") for call in open_calls]
            content = _join_lines([*_to_parts(message), *lines])
            message = message.model_copy(update={"tool_calls": None, "content": content})  # noqa: PLW2901 - its text form
            if not (content or message.refusal or message.reasoning):
                continue
        written.append(message)
    return _join_neighbours(written)


def _describe_call(call: ChatToolCall) -> str:
    if isinstance(call, FunctionCall):
        return f"{call.function.name}({call.function.arguments})"
    return f"{call.custom.name}({call.custom.input})"


# --- content ---------------------------------------------------------------------------------------------------------


def _join_lines(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return parts that are all texts as one text, others as they are."""
    texts = [
        part.text if isinstance(part, TextPart) else part.refusal
        for part in parts
        if isinstance(part, TextPart | RefusalPart)
    ]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _write_content_as_text(messages: list[Message]) -> list[Message]:
    return [
        message.model_copy(update={"content": _join_lines(message.content)})
        if isinstance(message.content, list)
        else message
        for message in messages
    ]


def _fill_content(messages: list[Message]) -> list[Message]:
    return [
        message if message.refusal else message.model_copy(update={"content": _fill(message.content)})
        for message in messages
    ]


def _fill(content: str | list[ContentPart] | None) -> str | list[ContentPart]:
    if not isinstance(content, list):
        return content if content and content.strip() else NO_TEXT
    return [part for part in content if not isinstance(part, TextPart) or part.text.strip()] or NO_TEXT


_CHANGES: Final[Mapping[Step, Callable[[list[Message]], list[Message]]]] = {
    Step.SHORT_CALL_IDS: _shorten_call_ids,
    Step.TOOLS_AS_TEXT: _write_tools_as_text,
    Step.NO_INSTRUCTIONS: _put_instructions_into_user,
    Step.INSTRUCTIONS_FIRST: _put_instructions_first,
    Step.USER_FIRST: _begin_with_user,
    Step.ALTERNATING: _join_neighbours,
    Step.USER_LAST: _end_with_user,
    Step.TEXT_CONTENT: _write_content_as_text,
    Step.FILLED_CONTENT: _fill_content,
}
"""The change of each step, in the order in which they are made."""
