"""The encoding of a text: as a mark or the text itself names it, as UTF-8, or as its bytes show.

chardet, not charset-normalizer: of short texts in 20 encodings it reads nine of ten rightly, the other eight.
"""

import codecs
import re
import unicodedata
from typing import Final

_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as the next one does
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
)
_DETECTED: Final = (
    *("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "big5hkscs", "cp866", "cp874", "cp932", "cp949", "euc-jp"),
    *("gb18030", "iso-2022-jp", "iso-8859-2", "koi8-r", *(f"cp125{number}" for number in range(9))),
)
_BROWSER_CHARSETS: Final = frozenset(
    {"utf-8", "utf-16", "utf-16-le", "utf-16-be", "big5", "big5hkscs", "cp866", "cp874", "cp932", "cp949", "euc_jp"}
    | {"euc_kr", "gb18030", "gb2312", "gbk", "iso2022_jp", "koi8-r", "koi8-u", "mac-roman", "shift_jis"}
    | {f"cp125{number}" for number in range(9)}
    | {f"iso8859-{number}" for number in range(2, 17)}
)
_DECLARED: Final = re.compile(
    rb"<(?:meta|\?xml)[^>]{1,256}?(?:charset|encoding)\s*=\s*[\"']?\s*([A-Za-z0-9_:-]{1,40})", re.IGNORECASE
)
_ADJACENT: Final = re.compile(rb"[\x80-\xff]{2}")
_SAMPLE_BYTES: Final = 64 * 1024
_SURE: Final = 0.1
"""Confidence of chardet from which a text with few letters beyond ASCII is not simply Western."""
_ESCAPES: Final = (b"\x1b$B", b"\x1b$@", b"\x1b$(", b"\x1b(J", b"\x1b(I")
"""Bytes by which ISO 2022 leaves ASCII."""
_CHECKED_CHARS: Final = 10_000
_MAX_ODD_SHARE: Final = 0.05


def decode_text(data: bytes) -> str | None:
    """Return the text of a file; None for bytes that are no text, or one of an unknown encoding."""
    if (marked := _decode_marked(data)) is not None:
        return marked
    if b"\0" not in data and (text := _decode_utf8(data)) is not None:
        return text
    codec = find_declared(data) or _detect(data)
    text = data.decode(codec, "replace") if codec else ""
    return text if text and _is_readable(text) else None


def decode_page(data: bytes, charset: str | None) -> str:
    """Return the text of a page by its mark, the charset that its server or itself names, or its bytes. As in browsers,
    one of an unknown encoding is Western."""
    if (marked := _decode_marked(data)) is not None:
        return marked
    if codec := (charset and _find_codec(charset)) or find_declared(data):
        return data.decode(codec, "replace")
    text = None if data.count(0) > len(data) // 5 else _decode_utf8(data)
    return text if text is not None else data.decode(_detect(data) or "cp1252", "replace")


def find_declared(data: bytes) -> str | None:
    """Return the codec that a page or an XML file declares in itself."""
    declared = _DECLARED.search(data, 0, 2048)
    return declared and _find_codec(declared[1].decode("ascii"))


def _decode_marked(data: bytes) -> str | None:
    """Return the text of data that begins with a byte order mark, else None."""
    for mark, codec in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(codec, "replace")
    return None


def _decode_utf8(data: bytes) -> str | None:
    """Return the text of data that is UTF-8, be it with single bad bytes; None for others."""
    if any(escape in data for escape in _ESCAPES):
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    # of the characters beyond ASCII in other encodings, few are UTF-8 by chance
    good = len(text) - len(text.encode("ascii", "ignore")) - bad
    return text if bad < good else None


def _detect(data: bytes) -> str | None:
    """Return the codec that the bytes look like; None where they look like none."""
    import chardet  # noqa: PLC0415 - a tenth of a second, for what few files need

    sample = data[:_SAMPLE_BYTES]
    if b"\0" not in data:
        sample = b"\n".join(line for line in data.splitlines() if not line.isascii() or b"\x1b" in line)[:_SAMPLE_BYTES]
    detected = chardet.detect(
        sample, include_encodings=_DETECTED, prefer_superset=True, compat_names=False, no_match_encoding="cp1252"
    )
    codec = detected["encoding"]
    if codec is not None and detected["confidence"] < _SURE and not _ADJACENT.search(sample) and b"\0" not in sample:
        return "cp1252"
    return codec


def _is_readable(text: str) -> bool:
    """Return False for what is hardly a text: bytes that no character has, or characters that no text has."""
    start = text[:_CHECKED_CHARS]
    odd = sum(1 for char in start if not char.isspace() and (char == "\ufffd" or unicodedata.category(char)[0] == "C"))
    return odd <= len(start) * _MAX_ODD_SHARE


def _find_codec(name: str) -> str | None:
    """Return Python's codec of this name if browsers have it too, else None."""
    try:
        codec = codecs.lookup(name.strip().strip("\"'")).name
    except (LookupError, ValueError):
        return None
    if codec in ("ascii", "iso8859-1"):
        return "cp1252"
    return codec if codec in _BROWSER_CHARSETS else None
