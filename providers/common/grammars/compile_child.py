"""Program that compiles grammars from outside with llguidance, in a process of its own with hard limits.

The library is native code: a grammar can exhaust its stack or its time, and no exception says so. Input: one line of
JSON for each task (`syntax` and `definition` of the grammar, the compiler's `limits`, the number of tokens of the
`vocabulary`, None for bytes, and `input`, a text to match, or None). Output: one line of JSON (`problem`, empty for a
valid grammar, and `is_match`). A task that exceeds a limit ends the process.
"""

import json
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    # `python -I` searches neither this folder nor the one that `providers` is in.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from providers.common.grammars.depth import InvalidGrammar, check_depth
from providers.common.grammars.relax import SchemaRelaxation
from providers.common.processes.limits import limit_process, limit_task, limit_wait

_MAX_CPU_S: Final = 2.0
_MAX_MEMORY_BYTES: Final = 768 * 2**20
_STACK_BYTES: Final = 2 * 2**20
"""A quarter of the stack that a compiler has in the server: what passes here cannot exhaust that one."""
_MAX_IDLE_S: Final = 120
_MAX_PROBLEM_CHARS: Final = 200
_MAX_LEFT_OUT: Final = 16
_BYTES: Final = 256
_FIRST_CONTROL_TOKEN: Final = 199_998
"""The first control token of the only vocabulary that has them, which is gpt-oss's."""


class _ControlTokens:
    """A vocabulary of so many tokens that has the bytes and the control tokens alone: no grammar names another."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.eos_token_id = _FIRST_CONTROL_TOKEN + 1
        self.special_token_ids = [*range(_FIRST_CONTROL_TOKEN, size)]
        ordinary = [bytes([token]) if token < _BYTES else b"" for token in range(_FIRST_CONTROL_TOKEN)]
        self.tokens = [*ordinary, *(f"<|{token}|>".encode() for token in self.special_token_ids)]

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


@cache
def _load_tokenizer(size: int | None) -> LLTokenizer:
    if size is None:
        return LLTokenizer("byte")
    return LLTokenizer(TokenizerWrapper(_ControlTokens(size)), n_vocab=size)


def _run(task: dict[str, Any]) -> dict[str, Any]:
    return _relax(task["schema"]) if "schema" in task else _compile(task)


def _relax(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.pop("x-guidance")

    def compiles(part: Mapping[str, Any]) -> bool:
        rules = json.dumps({**part, "x-guidance": options})
        matcher = LLMatcher(_load_tokenizer(None), LLMatcher.grammar_from_json_schema(rules), log_level=0)
        return not matcher.is_error()

    relaxation = SchemaRelaxation(compiles)
    return {"schema": relaxation.relax(schema), "left_out": relaxation.left_out[:_MAX_LEFT_OUT]}


def _compile(task: dict[str, Any]) -> dict[str, Any]:
    definition: str = task["definition"]
    if task["syntax"] == "lark":
        try:
            check_depth(definition)
        except InvalidGrammar as exc:
            return {"problem": str(exc), "is_match": False}
        grammar = LLMatcher.grammar_from_lark(definition)
    else:
        grammar = LLMatcher.grammar_from_regex(definition)
    limits = LLParserLimits(**task["limits"], verbose_errors=False)
    matcher = LLMatcher(_load_tokenizer(task["vocabulary"]), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"problem": _describe_error(matcher), "is_match": False}
    return {"problem": "", "is_match": task["input"] is None or _matches(matcher, task["input"].encode())}


def _describe_error(matcher: LLMatcher) -> str:
    """Return the error on one line. A grammar without any valid text has an empty mask."""
    error = matcher.get_error().partition("\n")[0].removesuffix(" <state>")[:_MAX_PROBLEM_CHARS]
    is_empty = "NoExtension" in f"{matcher.stop_reason()} {error}" or not error
    return "nothing matches it." if is_empty else error


def _matches(matcher: LLMatcher, data: bytes) -> bool:
    """Return whether the whole text is one of the grammar; True where the compiler's limits do not let it find out."""
    consumed = matcher.try_consume_tokens([*data])
    return matcher.is_error() or (consumed == len(data) and matcher.is_accepting())


def _serve() -> None:
    while True:
        limit_wait(_MAX_IDLE_S)
        line = sys.stdin.buffer.readline()
        limit_wait(0)
        if not line:
            return
        limit_task(_MAX_CPU_S)
        try:
            result = _run(json.loads(line))
        except UnicodeEncodeError:
            result = {"problem": "it has characters that are no Unicode text.", "is_match": False}
        except RecursionError:
            result = {"problem": "it is nested too deeply.", "is_match": False}
        limit_task(0)
        sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
        sys.stdout.buffer.flush()


def _main() -> None:
    limit_process(_MAX_MEMORY_BYTES)
    threading.stack_size(_STACK_BYTES)
    # not a daemon: this process ends with the thread
    threading.Thread(target=_serve).start()


if __name__ == "__main__":
    _main()
