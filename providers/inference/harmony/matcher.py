"""Matchers that compute the allowed next tokens: grammars compiled by llguidance over gpt-oss's vocabulary."""

import functools
import hashlib
import threading
import time
from collections import OrderedDict
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from apis.errors import InvalidRequest, UpstreamError
from providers.inference.harmony.grammar import GrammarPart, TurnGrammar
from providers.inference.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY_SIZE,
    Vocabulary,
)

MASK_BYTES: Final = VOCABULARY_SIZE // 8
MAX_CACHED_GRAMMARS: Final = 64
MAX_CACHED_VERDICTS: Final = 1024
END_OF_TEXT: Final = 199999
SPECIAL_TOKEN_IDS: Final = {
    "<|endoftext|>": END_OF_TEXT,
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
MAX_PROBLEM_CHARS: Final = 200
MAX_ITEMS_IN_ROW: Final = 4_200
"""Earley items after one token. An object with a thousand optional properties, the most that a schema may have, needs
4,050; a grammar that repeats optional choices has many more."""
MAX_STEP_ITEMS: Final = 10_000
"""Earley items that the mask of one token may make: about 10 ms. No grammar that the tests enforce needs 6,000."""
STEP_LEXER_FUEL: Final = 100_000
SLOW_MASK_S: Final = 0.05
MAX_SLOW_MASKS: Final = 3
"""A request whose masks take longer than SLOW_MASK_S of CPU time so many times in a row fails: all sequences of a step
wait for its masks, and the limits above count work, not time."""


class GrammarMatcher:
    """State of one turn in progress. Not thread-safe."""

    def __init__(self, ll_matcher: LLMatcher) -> None:
        self._ll_matcher = ll_matcher
        self._slow_masks = 0

    @property
    def is_done(self) -> bool:
        """True when the turn is complete: no token may follow."""
        return self._ll_matcher.is_stopped()

    def mask(self) -> bytes:
        """Return one bit per token that may come next: little-endian words, VOCABULARY_SIZE bits. In a complete turn
        only the end of text is allowed. Raises UpstreamError when the grammar becomes too complex to continue, or its
        last masks all took too long."""
        began = time.thread_time()
        mask = self._ll_matcher.compute_bitmask()
        self._raise_if_failed()
        self._slow_masks = self._slow_masks + 1 if time.thread_time() - began > SLOW_MASK_S else 0
        if self._slow_masks >= MAX_SLOW_MASKS:
            raise _too_complex_error()
        return mask[:MASK_BYTES]

    def accept(self, token: int) -> bool:
        """Accept the token if it is allowed, and return true; a token that is not allowed changes nothing. Raises the
        errors of `mask`."""
        taken = not self.is_done and self._ll_matcher.try_consume_tokens([token]) == 1
        self._raise_if_failed()
        return taken

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next if there is no alternative; they are not accepted yet."""
        return self._ll_matcher.compute_ff_tokens()

    def _raise_if_failed(self) -> None:
        if self._ll_matcher.is_error():
            raise _too_complex_error()


class GrammarCompiler:
    """Compiles grammars, each one once. Thread-safe; compiling lets other threads run."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        max_grammars: int = MAX_CACHED_GRAMMARS,
        max_verdicts: int = MAX_CACHED_VERDICTS,
    ) -> None:
        self._max_grammars = max_grammars
        self._max_verdicts = max_verdicts
        self._tokenizer = _load_tokenizer(vocabulary)
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            max_grammar_size=60_000,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=STEP_LEXER_FUEL,
            verbose_errors=False,
        )
        self._grammars: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def build_matcher(self, grammar: TurnGrammar) -> GrammarMatcher:
        """Return a matcher at the start of a turn. Raises InvalidRequest naming the field that cannot be compiled."""
        key = _digest(grammar.text)
        with self._lock:
            compiled = self._grammars.get(key)
            if compiled is not None:
                self._grammars.move_to_end(key)
                return GrammarMatcher(compiled.deep_copy())
        for part in grammar.parts:
            self._check_part(part)
        compiled = self._compile(grammar.text)
        if problem := _find_problem(compiled):
            param = grammar.parts[0].param if grammar.parts else None
            raise InvalidRequest(f"The request's schemas and grammars cannot be enforced: {problem}", param=param)
        with self._lock:
            self._grammars[key] = compiled
            while len(self._grammars) > self._max_grammars:
                self._grammars.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy())

    @property
    def cache_sizes(self) -> tuple[int, int]:
        """Return the number of cached compiled grammars, and of cached verdicts on parts of grammars."""
        return len(self._grammars), len(self._verdicts)

    def _check_part(self, part: GrammarPart) -> None:
        key = _digest(part.standalone_grammar)
        with self._lock:
            problem = self._verdicts.get(key)
        if problem is None:
            problem = _find_problem(self._compile(part.standalone_grammar))
            with self._lock:
                self._verdicts[key] = problem
                while len(self._verdicts) > self._max_verdicts:
                    self._verdicts.popitem(last=False)
        if problem:
            kind = "schema" if part.code else "grammar"
            message = f"The {kind} in {part.param} is not valid, or uses what cannot be enforced: {problem}"
            raise InvalidRequest(message, param=part.param, code=part.code)

    def _compile(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)


@functools.cache
def _load_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return llguidance's tokenizer, which takes 0.9 s to build. All compilers of a process share it, for it
    does not change."""
    return LLTokenizer(TokenizerWrapper(_GuidanceTokenizer(vocabulary)), n_vocab=VOCABULARY_SIZE)


class _GuidanceTokenizer:
    """The vocabulary with the methods that llguidance calls. It requests ids to write forced text as the model
    would."""

    eos_token_id = END_OF_TEXT
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        named = {token: name for name, token in SPECIAL_TOKEN_IDS.items()}
        ordinary = [vocabulary.decode_bytes(token) for token in range(FIRST_SPECIAL)]
        special = [named.get(token, f"<|reserved_{token}|>") for token in range(FIRST_SPECIAL, VOCABULARY_SIZE)]
        self.tokens = [*ordinary, *(name.encode() for name in special)]
        self.special_token_ids = list(range(FIRST_SPECIAL, VOCABULARY_SIZE))

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def _too_complex_error() -> UpstreamError:
    return UpstreamError("The model cannot be held to this request: its schema or grammar is too complex.")


def _find_problem(ll_matcher: LLMatcher) -> str:
    """Return the error on one line; empty if a turn can begin. A grammar without any valid text has an empty mask."""
    if not ll_matcher.is_error():
        ll_matcher = ll_matcher.deep_copy()
        ll_matcher.compute_bitmask()
    if not ll_matcher.is_error():
        return ""
    first = ll_matcher.get_error().partition("\n")[0].removesuffix(" <state>")
    return "nothing matches it" if "NoExtension" in ll_matcher.stop_reason() or not first else first[:MAX_PROBLEM_CHARS]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
