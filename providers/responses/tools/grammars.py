"""Grammars of custom tools: checked when they are declared, and matched with the finished input of a call on engines
that do not enforce them."""

import asyncio
import hashlib
import importlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from openai.types.responses import ResponseOutputItem

from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, ToolFailed
from apis.events import EventList
from apis.wire.text_format import Grammar
from providers.responses.events.open_items import OpenCustomCall
from providers.responses.tools.call import ClientCall

_MAX_DEFINITION_BYTES: Final = 256 * 1024
_MAX_INPUT_BYTES: Final = 256 * 1024
"""Longest input that is matched; a longer one counts as a match."""
_MAX_ITEMS_IN_ROW: Final = 2_000
"""Bound of the parser's work for one byte; a grammar that needs more is refused, or its input counts as a match."""
_MAX_PROBLEM_CHARS: Final = 200
_MAX_CACHED: Final = 1024
_FORMAT_ERROR: Final = "The input does not match the tool's grammar."
_verdicts: OrderedDict[bytes, str] = OrderedDict()
"""Problems of grammars by their hash, empty for a valid one, because agents send the same tools with every turn."""


async def check_grammars(grammars: Sequence[tuple[str, Grammar]]) -> None:
    """Raise InvalidRequest for the first grammar that does not compile; each comes with the field that declares it."""
    for param, grammar in grammars:
        key = hashlib.sha256(f"{grammar.syntax}\n{grammar.definition}".encode("utf-8", "surrogatepass")).digest()
        problem = _verdicts.get(key)
        if problem is None:
            problem = await asyncio.to_thread(_find_problem, grammar)
            _verdicts[key] = problem
            while len(_verdicts) > _MAX_CACHED:
                _verdicts.popitem(last=False)
        if problem:
            raise InvalidRequest(f"The grammar is not valid: {problem}", param=param, code="invalid_grammar")


class GrammarCall(ClientCall):
    """A call of a custom tool with a grammar, on an engine that does not enforce it. `is_match` is False once the
    finished input was matched and breaks the grammar."""

    item_type = "custom_tool_call"

    def __init__(self, start: ToolCallStart, grammar: Grammar, client_name: str, namespace: str | None) -> None:
        super().__init__(start)
        self.is_match = True
        self._grammar = grammar
        self._client_name = client_name
        self._namespace = namespace
        self._must_deliver = False

    async def match_input(self) -> None:
        self.is_match = await asyncio.to_thread(_matches, self._grammar, self.text)

    def deliver_mismatch(self) -> None:
        """Have the call delivered in spite of its input; its item then says so in `format_error`."""
        self._must_deliver = True

    def validate_arguments(self) -> None:
        if not self.is_match and not self._must_deliver:
            raise ToolFailed(
                f"Not run: the input of `{self.name}` does not match the grammar in its description. Call it again "
                "with an input that does."
            )

    def open(self) -> EventList:
        return self._build_item().open()

    def close(self, status: str) -> EventList:
        item, events = self._build_item(), list[Any]()
        if self.text:
            item.append(self.text, events)
        *done, item_done = item.close("completed")
        return [*events, *done, item_done.model_copy(update={"item": self.item(status)})]

    def item(self, status: str) -> ResponseOutputItem:
        built = self._build_item()
        if self.text:
            built.append(self.text, [])
        item = built.item("completed")
        return item if self.is_match else item.model_copy(update={"format_error": _FORMAT_ERROR})

    def _build_item(self) -> OpenCustomCall:
        return OpenCustomCall(self.id, self.index, self.call_id, self._client_name, self._namespace)


def _find_problem(grammar: Grammar) -> str:
    """Return why the grammar does not compile, on one line; empty for a valid one."""
    if len(grammar.definition.encode("utf-8", "surrogatepass")) > _MAX_DEFINITION_BYTES:
        return f"it is larger than {_MAX_DEFINITION_BYTES} bytes."
    matcher = _build_matcher(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    return matcher.get_error().partition("\n")[0].removesuffix(" <state>")[:_MAX_PROBLEM_CHARS] or "nothing matches it."


def _matches(grammar: Grammar, text: str) -> bool:
    """Return whether the whole text is one of the grammar; True where that cannot be found out within the bounds."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > _MAX_INPUT_BYTES:
        return True
    matcher = _build_matcher(grammar)
    if matcher.is_error():
        return True
    consumed = matcher.try_consume_tokens([*data])
    return matcher.is_error() or (consumed == len(data) and matcher.is_accepting())


def _build_matcher(grammar: Grammar) -> Any:
    """Return an llguidance.LLMatcher over bytes (https://github.com/guidance-ai/llguidance)."""
    # loaded by the first grammar: most processes never use it
    llguidance: Any = importlib.import_module("llguidance")
    matchers = llguidance.LLMatcher
    convert = matchers.grammar_from_lark if grammar.syntax == "lark" else matchers.grammar_from_regex
    limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, verbose_errors=False)
    return matchers(llguidance.LLTokenizer("byte"), convert(grammar.definition), log_level=0, limits=limits)
