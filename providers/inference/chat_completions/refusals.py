"""Refusals of chats, and the form in which a chat is sent next.

Chat templates and engines refuse what others take, and say so with an error. `_STEPS` is the table: how the error
reads, and which change of the chat is tried then. A field that is refused by its name is left out, where that does not
change the answer. The form that was accepted is remembered for the server's model, for some minutes: the template of a
model may be exchanged while both servers run.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic
from typing import Final, TypeVar

from apis.chat import ChatRequest, Message
from apis.errors import StackError
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import (
    INNER_FIELDS,
    OMITTABLE_FIELDS,
    ChatDialect,
    can_omit,
    is_instruction,
)
from providers.inference.chat_completions.strict_templates import IMPLIED, Step, arrange_messages

ResultT = TypeVar("ResultT")
MAX_FORMED_MODELS: Final = 1024
"""Models of a server, whose names may be any that callers choose, of which the form of chats is remembered."""
FORM_MAX_AGE_S: Final = 600.0
"""Seconds after which a model is sent the plain form again."""
MAX_FORMS: Final = 8
"""Further forms in which one chat is sent."""

_NOT_TAKEN: Final = r"not (?:be )?(?:support|allow|permit|accept|valid|implement|recogni[sz])"
_ANY_SUBJECT: Final = re.compile(
    r"\b(?:system|developer)['\"`]?[ _-](?:message|role|prompt|instruction)|\broles?\b|['\"`](?:system|developer)['\"`]"
    r"|\b(?:first|last|final) message\b|\b(?:message|role)s?:? ['\"`]?(?:system|developer)\b",
    re.IGNORECASE,
)
_DEMAND: Final = re.compile(
    rf"\b(?:must|should|only|cannot|can't)\b|{_NOT_TAKEN}|expected"
    r"|unsupported|unknown|invalid|illegal|alternat|multiple|more than one|at most|in a row|duplicate",
    re.IGNORECASE,
)
_TEXT_CONTENT: Final = re.compile(
    r"content\b.{0,80}(?:must|should|expected|has to|only) (?:to )?(?:be )?(?:an? )?(?:valid |plain )?"
    r"(?:string|str|text)\b"
    r"|can only concatenate|string_type|valid string|expected (?:an? )?(?:string|str)\b|unmarshal array"
    r"|invalid type: sequence|list(?: object)?['\"`]? (?:object )?has no attribute|unsupported operand.{0,60}list",
    re.IGNORECASE,
)
_NO_CONTENT: Final = re.compile(
    r"content\b.{0,80}(?:null|none\b|missing|required|empty|blank)|(?:null|none|empty|missing|blank)\b.{0,80}content"
    r"|NoneType|string_type|valid string|string_too_short|at least 1 character|non-?whitespace",
    re.IGNORECASE,
)
_CALL_ID: Final = re.compile(
    r"call[ _]?ids?\b.{0,160}(?:length|characters|a-z|alphanumeric|pattern|too long)"
    r"|tool_calls?\[\d+\]\.id\b.{0,80}(?:too long|pattern|expected)",
    re.IGNORECASE,
)
_TOOL_ROLE: Final = re.compile(
    r"(?:unknown|unsupported|unexpected|invalid|illegal)\b.{0,40}\btool\b|same number of function calls and responses"
    rf"|\btool['\"`]? (?:role|message|result|call)s?\b.{{0,40}}{_NOT_TAKEN}|\brole:? ['\"`]?tool\b.{{0,40}}{_NOT_TAKEN}"
    r"|\brole\b.{0,200}\"input\" ?: ?\"tool\"",
    re.IGNORECASE,
)
_ALTERNATION: Final = re.compile(
    r"alternat|consecutive|in a row|same role|followed by|2 or more assistant", re.IGNORECASE
)
_USER_LAST: Final = re.compile(
    r"got assistant|(?:last|final) (?:message|role|turn)\b.{0,60}\buser\b|end(?:s|ing)? with\b.{0,20}\buser\b|prefill"
    r"|\bassistant\b.{0,60}\b(?:last|final|end)\b|\b(?:last|final)\b.{0,60}\bassistant\b",
    re.IGNORECASE,
)
_USER_FIRST: Final = re.compile(
    r"no user (?:query|message|turn)|(?:first|at least one|start|begin)\b.{0,60}\buser\b"
    r"|\buser (?:message|role|query)\b.{0,40}(?:required|missing|first|found)",
    re.IGNORECASE,
)
_NO_ROLE: Final = re.compile(
    rf"\b(?:system|developer)\b.{{0,40}}(?:{_NOT_TAKEN}|unsupported|unknown)"
    r"|\bonly\b.{0,20}\buser\b.{0,60}\b(?:role|message|support|allow|accept)"
    r"|\brole\b.{0,200}\"input\" ?: ?\"(?:system|developer)\"",
    re.IGNORECASE,
)
_FIELD_REFUSAL: Final = re.compile(
    rf"extra_forbidden|extra (?:inputs|fields)|unrecogni[sz]ed|unsupported|{_NOT_TAKEN}|does(?: not|n't) support"
    r"|(?:unknown|unexpected|invalid) (?:name|field|param|argument|key|property)|additional propert"
    r"|use ['\"`]?max_tokens",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"\w+")
_IN_MESSAGES: Final = re.compile(r"['\"`]$|\bmessages[^\s,;]{0,80}[.\[/]['\"]?$")
_IN_IMAGE_URL: Final = re.compile(r"['\"`]$|\bimage_url[^\s,;]{0,80}[.\[/]['\"]?$")
_PATHS: Final = {"name": _IN_MESSAGES, "reasoning": _IN_MESSAGES, "detail": _IN_IMAGE_URL}
"""Names of fields that are words of other refusals, too -> what stands before them where they name the field: a quote,
or its path."""
_FIELD_CONTEXT_CHARS: Final = 100
"""Characters around the name of a field in which its refusal is."""
_STEPS: Final[Sequence[tuple[re.Pattern[str] | None, Step]]] = (
    (_TEXT_CONTENT, Step.TEXT_CONTENT),
    (_NO_CONTENT, Step.TEXT_FOR_NULL),
    (_NO_CONTENT, Step.FILLED_CONTENT),
    (_CALL_ID, Step.SHORT_CALL_IDS),
    (_TOOL_ROLE, Step.TOOLS_AS_TEXT),
    (_ALTERNATION, Step.ALTERNATING),
    (_ALTERNATION, Step.TOOLS_AS_TEXT),
    (_USER_LAST, Step.USER_LAST),
    (_USER_FIRST, Step.USER_FIRST),
    (_NO_ROLE, Step.NO_INSTRUCTIONS),
    (None, Step.INSTRUCTIONS_FIRST),
    (None, Step.ALTERNATING),
    (None, Step.NO_INSTRUCTIONS),
    (None, Step.TOOLS_AS_TEXT),
)
"""Words of a refusal -> the step that is tried. The first one that changes the chat is taken. None stands for any
refusal that speaks of messages or roles, and of what they must or must not be."""


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form in which a server's model takes chats: the steps that change them, and the fields of the body that it
    refuses."""

    steps: frozenset[Step] = frozenset()
    omitted: frozenset[str] = frozenset()


_SENT_FORM: Final = ChatForm()
"""The form in which a chat comes here, before a server has refused it."""


class ChatForms:
    """The forms in which the models of one server take chats, each for `max_age_s` after it was learned. `clock` gives
    seconds."""

    def __init__(self, max_age_s: float = FORM_MAX_AGE_S, clock: Callable[[], float] = monotonic) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._forms = RecentEntries[str, tuple[ChatForm, float]](MAX_FORMED_MODELS)

    def __len__(self) -> int:
        return len(self._forms)

    def find(self, model: str) -> ChatForm | None:
        """Return the form that a model is known to take; None where the plain one is to be tried."""
        form, learned_at = self._forms.find(model) or (None, 0.0)
        if form is not None and self._clock() - learned_at > self._max_age_s:
            del self._forms[model]
            return None
        return form

    def learn(self, model: str, form: ChatForm) -> None:
        """Remember a form that a model has accepted."""
        self._forms[model] = form, self._clock()


class ArrangedChat:
    """A chat in the form that its server's model takes, as far as that is known from `forms`. `request` and `dialect`
    are what to send, and `original` is what the answer belongs to."""

    def __init__(self, request: ChatRequest, dialect: ChatDialect, forms: ChatForms) -> None:
        self.request = request
        self.dialect = dialect
        self.original = request
        self._forms = forms
        self._form = _SENT_FORM
        self._tried = 0
        if form := forms.find(request.model):
            self._arrange(form)

    def adapt(self, error: StackError) -> bool:
        """Bring the chat into another form, if the error is a refusal of this one; return true if that changes it."""
        text = " ".join([error.message, *getattr(error, "__notes__", ())])
        if self._tried >= MAX_FORMS:
            return False
        if names := self._find_fields(text):
            self._arrange(replace(self._form, omitted=self._form.omitted | names))
            self._tried += 1
            return True
        for step in self._find_steps(text):
            steps = self._form.steps | {step} | IMPLIED.get(step, frozenset())
            former = self.request.messages, self._form
            self._arrange(replace(self._form, steps=steps))
            if self.request.messages != former[0] or (step == Step.TEXT_FOR_NULL and _has_null(former[0])):
                self._tried += 1
                return True
            self._arrange(former[1])
        return False

    def remember(self) -> None:
        """Remember a form that the server has accepted, where this chat has found it."""
        if self._tried:
            self._forms.learn(self.request.model, self._form)

    async def submit(self, send: Callable[[ChatRequest, ChatDialect], Awaitable[ResultT]]) -> ResultT:
        """Return what `send` returns for the form that the server accepts."""
        while True:
            try:
                result = await send(self.request, self.dialect)
            except StackError as exc:
                if not self.adapt(exc):
                    raise
            else:
                self.remember()
                return result

    def _find_steps(self, text: str) -> Iterator[Step]:
        """Yield the steps that a refusal suggests, of those that are not taken."""
        is_any = _ANY_SUBJECT.search(text) and _DEMAND.search(text)
        for pattern, step in _STEPS:
            # A template that refuses the role of a later instruction may take it before all turns.
            if pattern is _NO_ROLE and _has_later_instruction(self.request.messages):
                continue
            if step not in self._form.steps and (pattern.search(text) if pattern else is_any):
                yield step

    def _find_fields(self, text: str) -> frozenset[str]:
        """Return the fields that a refusal names, of those that can be left out."""
        return frozenset(
            word[0]
            for word in _WORD.finditer(text)
            if (word[0] in OMITTABLE_FIELDS or word[0] in INNER_FIELDS)
            and word[0] not in self._form.omitted
            and (
                word[0] not in _PATHS
                or _PATHS[word[0]].search(text, max(0, word.start() - _FIELD_CONTEXT_CHARS), word.start())
            )
            and _FIELD_REFUSAL.search(
                text, max(0, word.start() - _FIELD_CONTEXT_CHARS), word.end() + _FIELD_CONTEXT_CHARS
            )
            and can_omit(self.original, word[0])
        )

    def _arrange(self, form: ChatForm) -> None:
        self._form = form
        self.request = self.request.model_copy(
            update={"messages": arrange_messages(self.original.messages, form.steps)}
        )
        null_content = Step.TEXT_FOR_NULL not in form.steps
        self.dialect = replace(self.dialect, null_content=null_content, omitted=form.omitted)


def _has_null(messages: Sequence[Message]) -> bool:
    """Return true if a message is sent with a content that is null."""
    return any(message.tool_calls and not (message.content or message.refusal) for message in messages)


def _has_later_instruction(messages: Sequence[Message]) -> bool:
    return any(is_instruction(second) and not is_instruction(first) for first, second in pairwise(messages))
