"""Messages as strict chat templates take them.

Templates of many models refuse a system message after the first turn, two messages of one role in a row, or system
messages at all. A server says so with an error, once: the chat is then sent in the next stricter order, and the order
that was accepted is remembered for the server's model. Instructions keep their own role wherever the template has one.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Final

from apis.chat import ChatRequest, ContentPart, Message, TextPart
from apis.errors import StackError
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import is_instruction, join_text_parts


class MessageOrder(IntEnum):
    """Orders of messages, each stricter than the one before: as they are; with all instructions first; with turns that
    alternate, too; with the instructions as the beginning of the first user message."""

    AS_SENT = 0
    INSTRUCTIONS_FIRST = 1
    ALTERNATING = 2
    NO_INSTRUCTIONS = 3


_SUBJECT: Final = re.compile(
    r"\b(?:system|developer)['\"`]?[ _-](?:message|role|prompt|instruction)|\broles?\b|['\"`](?:system|developer)['\"`]"
    r"|\b(?:first|last|final) message\b|\b(?:message|role)s?:? ['\"`]?(?:system|developer)\b",
    re.IGNORECASE,
)
_DEMAND: Final = re.compile(
    r"\b(?:must|should|only|cannot|can't)\b|\bnot (?:be )?(?:support|allow|permit|accept|valid|implement)|expected"
    r"|unsupported|unknown|invalid|illegal|alternat|multiple|more than one|at most|in a row|duplicate",
    re.IGNORECASE,
)
"""A refusal of a template speaks of messages or roles, and of what they must or must not be."""
_ALTERNATION: Final = re.compile(r"alternat|consecutive|in a row|same role|followed by", re.IGNORECASE)
_NO_ROLE: Final = re.compile(
    r"\b(?:system|developer)\b.{0,40}(?:not (?:be )?(?:support|allow|permit|accept)|unsupported|unknown)"
    r"|\bonly\b.{0,20}\buser\b.{0,60}\b(?:role|message|support|allow|accept)",
    re.IGNORECASE,
)


class ArrangedChat:
    """A chat in the order that its server's model takes, as far as that is known from `orders`, by model."""

    def __init__(self, request: ChatRequest, orders: RecentEntries[str, MessageOrder]) -> None:
        self.request = request
        self._messages = request.messages
        self._orders = orders
        self._order = orders.find(request.model) or MessageOrder.AS_SENT
        if self._order:
            self._arrange(self._order)

    def adapt(self, error: StackError) -> bool:
        """Put the messages into the next stricter order, if the error is a refusal of this one; return true if that
        changes them."""
        text = " ".join([error.message, *getattr(error, "__notes__", ())])
        if not (_SUBJECT.search(text) and _DEMAND.search(text)):
            return False
        least = self._order + 1
        if _ALTERNATION.search(text):
            least = max(least, MessageOrder.ALTERNATING)
        elif _NO_ROLE.search(text) and not _has_later_instruction(self.request.messages):
            least = max(least, MessageOrder.NO_INSTRUCTIONS)
        former = self.request.messages
        for order in MessageOrder:
            if order >= least:
                self._arrange(order)
                if self.request.messages != former:
                    return True
        return False

    def remember(self) -> None:
        """Remember an order that the server has accepted."""
        if self._order:
            self._orders[self.request.model] = self._order

    def _arrange(self, order: MessageOrder) -> None:
        self._order = order
        self.request = self.request.model_copy(update={"messages": arrange_messages(self._messages, order)})


def _has_later_instruction(messages: Sequence[Message]) -> bool:
    """Return true if an instruction follows a turn: a template that refuses its role may take it before all turns."""
    return any(is_instruction(second) and not is_instruction(first) for first, second in pairwise(messages))


def arrange_messages(messages: Sequence[Message], order: MessageOrder) -> list[Message]:
    """Return the messages in an order."""
    if order == MessageOrder.AS_SENT:
        return [*messages]
    instructions = [message for message in messages if is_instruction(message)]
    turns = [message for message in messages if not is_instruction(message)]
    if order == MessageOrder.NO_INSTRUCTIONS and instructions:
        texts = (join_text_parts(message) for message in instructions)
        preface = Message(role="user", content="\n\n".join(text for text in texts if text))
        at = next((at for at, message in enumerate(turns) if message.role == "user"), 0)
        turns.insert(at, preface)
        instructions = []
    if order == MessageOrder.INSTRUCTIONS_FIRST:
        return [*instructions, *turns]
    joined: list[Message] = []
    for message in turns:
        if joined and message.role == joined[-1].role and message.role in ("user", "assistant"):
            joined[-1] = _join_messages(joined[-1], message)
        else:
            joined.append(message)
    return [*instructions, *joined]


def _join_messages(first: Message, second: Message) -> Message:
    thoughts = "\n".join(text for text in (first.reasoning, second.reasoning) if text)
    content = _join_texts(first.content or "", second.content or "")
    return first.model_copy(
        update={
            "content": content if content is not None else [*_to_parts(first), *_to_parts(second)],
            "name": first.name if first.name == second.name else None,
            "reasoning": thoughts or None,
            "refusal": first.refusal or second.refusal,
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
