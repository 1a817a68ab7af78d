"""Child program: times the parsers of text from files, pages, tools and models, as `linear_time` does expressions."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Final

from apis.errors import StackError
from apis.tool_runtime import Source
from providers.common.grammars.depth import InvalidGrammar, check_depth
from providers.common.grammars.schema_values import InvalidSchema, check_pattern_syntax
from providers.common.net.http.event_stream import EventReader
from providers.inference.chat_completions.custom_tools import CustomInputReader
from providers.inference.harmony.grammar import request_to_grammar
from providers.inference.harmony.read import HarmonyReader
from providers.inference.harmony.vocabulary import load_vocabulary
from providers.reader.chunks import find_chunks
from providers.reader.html_text import html_to_page, text_to_page
from providers.responses.events.citations import CitationScanner, one_line
from providers.responses.events.tool_result import ContainerFile
from providers.responses.tools.code_interpreter.code_text import CodeParser
from providers.responses.tools.web_search.pages import wrap_lines
from providers.tool_runtime.python.output import ProgramOutput
from stack.http.parsing import parse_object
from tests.providers.harmony.turns import chat_request, custom, encode
from tests.support.laws.linear_time import TooSlow, prepare_timing, timed

RUNS: Final = (" ", "\n", "a", "1", "[", '"', "<", "\\", "\x1b", "【", '\\"', "/a\\", "%json {")
PARSER_CHARS: Final = 40_000
PARSER_S: Final = 0.16
PIECE_CHARS: Final = 16
"""A parser that reads all of its buffer with each piece takes seconds for PARSER_CHARS."""


def feed_pieces(feed: Callable[[str], object], text: str) -> None:
    for start in range(0, len(text), PIECE_CHARS):
        feed(text[start : start + PIECE_CHARS])


def _cite(text: str) -> None:
    source = Source(url="https://a.example/", title="A")
    file = ContainerFile("c", "f")
    feed_pieces(CitationScanner({1: source}, {"/mnt/data/a.txt": file}).feed, text)


def _read_events(text: str) -> None:
    reader = EventReader()
    feed_pieces(lambda piece: reader.feed(piece.encode()), text)


def _read_harmony(text: str) -> None:
    reader = HarmonyReader(load_vocabulary(), chat_request(tools=[custom("t")]))
    ids = encode(text[:2000])
    for _ in range(max(1, len(text) // 20 // len(ids))):
        reader.feed(ids)
    reader.finish("stop", input_tokens=0, cached_tokens=0)


def _build_turn_grammar(text: str) -> None:
    for syntax in ("lark", "regex"):
        request_to_grammar(chat_request(tools=[custom("t", syntax, text)]))


def _read_page(text: str) -> None:
    html_to_page(text.encode(), "https://a.example/", None, 10**6)


def _read_input(text: str) -> None:
    feed_pieces(CustomInputReader().feed, text)


def _write_output(text: str) -> None:
    output = ProgramOutput(10 * len(text))
    feed_pieces(lambda piece: output.feed(piece.encode()), text)
    output.text()


PARSERS: Final[dict[str, tuple[Callable[[str], object], tuple[str, ...]]]] = {
    "server-sent events": (_read_events, ("", "data: ", "data: {", ": ", "\ufeff")),
    "Harmony": (
        _read_harmony,
        ("<|channel|>", "<|start|>assistant", "<|channel|>commentary to=functions.t<|message|>"),
    ),
    "citations": (_cite, ("", "【1", "【1†", "sandbox:/mnt/data/")),
    "HTML": (
        _read_page,
        ("", "<a href='", "<!--", "<p>"),
    ),
    "Lark grammars": (check_depth, ("", "start: ", "start: /[^/")),
    "grammars of Harmony turns": (_build_turn_grammar, ("", "start: ", "start: /[^/")),
    "plain pages": (lambda text: text_to_page(text.encode(), None, 10**6), ("",)),
    "JSON": (lambda text: parse_object(text.encode()), ("", '{"a":"', "[", '{"a":')),
    "code in JSON": (lambda text: feed_pieces(CodeParser(is_raw=False).feed, text), ("", '{"code":"', "{")),
    "input in JSON": (
        _read_input,
        ("", '{"input":"', '{"input":"a"', '{"input":"a"}', "{"),
    ),
    "program output": (_write_output, ("", "\x1b[", "\x1b]")),
    "patterns of schemas": (lambda text: check_pattern_syntax(text, strict=True), ("", "[", "(?<", "a{")),
    "chunks": (lambda text: sum(1 for _ in find_chunks(text, 800, 400)), ("", "a")),
    "lines of pages": (wrap_lines, ("",)),
    "names in JSON": (one_line, ("",)),
}
"""Parsers of text from files, pages, tools and models, with the beginnings that they like."""


def _ignoring_refusals(parse: Callable[[str], object]) -> Callable[[str], None]:
    def call(text: str) -> None:
        with suppress(StackError, InvalidSchema, InvalidGrammar):
            parse(text)

    return call


def find_slow_parsers() -> Iterator[str]:
    """Yield the parsers that are not linear, after a short call of each that loads what it needs."""
    for name, (parse, heads) in PARSERS.items():
        quietly = _ignoring_refusals(parse)
        timed(quietly, "a", 30.0)
        for run, head in product(RUNS, heads):
            try:
                timed(quietly, head + run * (PARSER_CHARS // len(run)), PARSER_S)
            except TooSlow:
                yield f"{name}: {head!r} + {run!r} * {PARSER_CHARS // len(run)}"


def main() -> None:
    prepare_timing()
    for line in find_slow_parsers():
        print(line, flush=True)


if __name__ == "__main__":
    main()
