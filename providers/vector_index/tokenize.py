"""The words of a query, for a keyword search."""

import re
from typing import Final

MAX_WORDS: Final = 64
_MAX_CHARS: Final = 20_000
_WORD: Final = re.compile(r"[^\W_]+")


_STOP_WORDS_TEXT: Final = (
    "a about an and any are as at be been but by can could did do does for from had has have he her him his how i if "
    "in into is it its me my no not of on or our shall she should so such than that the their them then there these "
    "they this those to us was we were what when where which who whom whose why will with would you your"
)
_STOP_WORDS: Final = frozenset(_STOP_WORDS_TEXT.split())


def text_to_words(text: str) -> list[str]:
    """Return the first MAX_WORDS different words of `text`, in lower case. Stop words are omitted, unless there are no
    others."""
    words = dict.fromkeys(match[0] for match in _WORD.finditer(text[:_MAX_CHARS].lower()))
    content_words = [word for word in words if word not in _STOP_WORDS]
    return (content_words or list(words))[:MAX_WORDS]
