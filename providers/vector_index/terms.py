"""What of a text counts in a search for words: its stems, each as a number of 64 bits, for an index of our own.

A stem's number is a hash: two of a store's stems have the same one about once in ten million stores of a million stems.
"""

import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import snowballstemmer  # pyright: ignore[reportMissingTypeStubs] - it has no types

from providers.vector_index.tokenize import text_to_words

_WORD: Final = re.compile(r"[^\W_]+")
_MARKS: Final = re.compile("[\u0300-\u036f]+")
_ENGLISH: Final[Any] = snowballstemmer.stemmer("english")  # pyright: ignore[reportUnknownMemberType] - as above
_ONE_AT_A_TIME: Final = threading.Lock()
"""The stemmer keeps the word it is at."""


def text_to_terms(text: str) -> Mapping[int, int]:
    """How often each term is in the text."""
    terms: Counter[int] = Counter()
    for word, times in Counter(_WORD.findall(_plain(text))).items():
        terms[_word_to_term(word)] += times
    return terms


def query_to_terms(text: str) -> list[int]:
    """The different terms of a query; those that say nothing only where there are no others."""
    return list(dict.fromkeys(_word_to_term(word) for word in text_to_words(_plain(text))))


def _plain(text: str) -> str:
    """In lower case, and letters without accents."""
    lower = text.lower()
    return (
        lower if lower.isascii() else unicodedata.normalize("NFC", _MARKS.sub("", unicodedata.normalize("NFD", lower)))
    )


@lru_cache(maxsize=1 << 16)
def _word_to_term(word: str) -> int:
    with _ONE_AT_A_TIME:
        stem = str(_ENGLISH.stemWord(word))
    return int.from_bytes(blake2b(stem.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
