"""Matchers that compute the allowed next tokens: grammars compiled by llguidance over gpt-oss's vocabulary."""

import functools
import hashlib
import threading
import time
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from apis.errors import InvalidRequest, UpstreamError
from providers.common.grammars.checks import GrammarSource, compile_grammar
from providers.common.recent import RecentEntries
from providers.inference.harmony.grammar import TurnGrammar
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
COMPILER_LIMITS: Final[dict[str, Any]] = {
    # Earley items after one token. An object with a thousand optional properties, the most that a schema may have,
    # needs 4,050; a grammar that repeats optional choices has many more.
    "max_items_in_row": 4_200,
    "max_grammar_size": 60_000,
    # Earley items that the mask of one token may make: about 10 ms. No grammar that the tests enforce needs 6,000.
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
}
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
    """Compiles grammars, each one once, after a child process has compiled it. Thread-safe; compiling lets other
    threads run."""

    def __init__(self, vocabulary: Vocabulary, *, max_grammars: int = MAX_CACHED_GRAMMARS) -> None:
        self._tokenizer = _load_tokenizer(vocabulary)
        self._limits = LLParserLimits(**COMPILER_LIMITS, verbose_errors=False)
        self._grammars = RecentEntries[bytes, LLMatcher](max_grammars)
        self._lock = threading.Lock()

    def find_matcher(self, grammar: TurnGrammar) -> GrammarMatcher | None:
        """Return a matcher at the start of a turn; None for a grammar that is not compiled yet."""
        key = _digest(grammar.text)
        with self._lock:
            compiled = self._grammars.find(key)
            return None if compiled is None else GrammarMatcher(compiled.deep_copy())

    def build_matcher(self, grammar: TurnGrammar) -> GrammarMatcher:
        """Return a matcher at the start of a turn, for callers in `run_in_turn`. Raises InvalidRequest naming the field
        that cannot be compiled."""
        matcher = self.find_matcher(grammar)
        if matcher is not None:
            return matcher
        for part in grammar.parts:
            if problem := compile_grammar(_to_source(part.standalone_grammar)):
                raise InvalidRequest(
                    f"The {part.kind} in {part.param} is not valid, or uses what cannot be enforced: {problem}",
                    param=part.param,
                    code=part.code,
                )
        compiled, problem = None, compile_grammar(_to_source(grammar.text))
        if not problem:
            compiled = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=self._limits)
            problem = _find_problem(compiled)
        if problem or compiled is None:
            param = grammar.parts[0].param if grammar.parts else None
            raise InvalidRequest(f"The request's schemas and grammars cannot be enforced: {problem}", param=param)
        with self._lock:
            self._grammars[_digest(grammar.text)] = compiled
            return GrammarMatcher(compiled.deep_copy())

    @property
    def cached_count(self) -> int:
        """Return the number of compiled grammars in the cache."""
        return len(self._grammars)


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


def _to_source(text: str) -> GrammarSource:
    return GrammarSource(text, vocabulary=VOCABULARY_SIZE, limits=COMPILER_LIMITS)


def _find_problem(ll_matcher: LLMatcher) -> str:
    """Return the error on one line; empty if a turn can begin."""
    if not ll_matcher.is_error():
        ll_matcher = ll_matcher.deep_copy()
        ll_matcher.compute_bitmask()
    return ll_matcher.get_error().partition("\n")[0] if ll_matcher.is_error() else ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
