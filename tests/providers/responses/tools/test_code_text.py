"""Code read out of arguments that are cut anywhere is the code that the whole arguments hold."""

import json
import random

import pytest

from apis.errors import ToolFailed
from providers.responses.tools.code_interpreter.code_text import CodeParser

ALPHABET = [*'"\\\n\t/u{}:, x', "d83d", "code", "é", "\u2028", "\x00", "😀", "👩\u200d🚀"]


def read(pieces: list[str], *, raw: bool = False) -> tuple[list[str], str]:
    """The deltas, and the code they make."""
    text = CodeParser(is_raw=raw)
    deltas = [text.feed(piece) for piece in pieces]
    deltas.append(text.finish("".join(pieces)))
    assert "".join(deltas) == text.code
    return deltas, text.code


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_any_code_is_read_over_any_cuts() -> None:
    rng = random.Random(4)
    for _ in range(3000):
        code = "x" + "".join(rng.choices(ALPHABET, k=rng.randrange(30)))
        written = json.dumps({"code": code}, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
        pieces = [*written] if rng.random() < 0.2 else cut(written, rng)
        assert read(pieces)[1] == code


def test_code_streams_while_the_model_writes_the_arguments() -> None:
    pieces = ['{"co', 'de": "pri', 'nt(\\"', "\\ud83d", "\\ude", "00", '\\")', "\\", 'n"', "}"]
    assert read(pieces)[0] == ["", "pri", 'nt("', "", "", "😀", '")', "", "\n", "", ""]


@pytest.mark.parametrize("written", ["x = 1\nx", ' \n"a"', "[1]", "import json; json.loads('{}')"])
def test_arguments_that_are_no_object_are_raw_code(written: str) -> None:
    assert read([*written])[1] == written


def test_raw_code_may_begin_like_an_object() -> None:
    deltas, code = read(['{"code"', ': "x"}'], raw=True)
    assert (deltas, code) == (['{"code"', ': "x"}', ""], '{"code": "x"}')


def test_code_after_other_arguments_is_read_at_the_end() -> None:
    assert read(['{"language": "python", ', '"code": "1', '"}']) == (["", "", "", "1"], "1")


def test_unescaped_line_breaks_are_accepted() -> None:
    assert read(['{"code": "a\n', 'b"}'])[1] == "a\nb"


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ud83d\\ud83d", "\\ude00\\ud83d"])
def test_half_characters_become_one_that_can_be_stored(escape: str) -> None:
    for written in (f'{{"code": "x{escape}"}}', f'{{"code": "x{escape}y"}}'):
        code = read([*written])[1]
        assert code == json.loads(written)["code"].replace("\ud83d", "\ufffd").replace("\ude00", "\ufffd")


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "{",
        "{oops",
        "{}",
        '{"code": 5}',
        '{"code": ""}',
        '{"code": "  "}',
        '{"code": null}',
        '{"code": "x',
        '{"code": "x"',
        '{"code": "print("hi")"}',
        '{"code": "\\x"}',
        '{"code": "\\uZZZZ and more"}',
        '{"code": "a", "code": "b"}',
        '{"code": ["x"]}',
        '{"a": ' + "[" * 100_000,
    ],
)
def test_other_arguments_are_an_error_for_the_model(written: str) -> None:
    for pieces in ([written], [*written[:1000]]):
        with pytest.raises(ToolFailed):
            read(pieces)


def test_long_code_in_small_pieces_takes_time_in_proportion_to_its_length() -> None:
    code = "x" * 60_000
    assert len(read([*json.dumps({"code": code})])[1]) == len(code)
    with pytest.raises(ToolFailed):
        read([*'{"code": "\\u', *"Z" * 60_000])
    with pytest.raises(ToolFailed):
        read([*"{", *" " * 60_000])
