"""The spellings of a secret, by which it is found in what a server gives back that got it."""

import base64
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import quote

MAX_SECRETS_BYTES: Final = 64 * 1024
"""Length of all values of a container together: each answer of a host is searched for all of its values."""
MAX_SECRET_VALUES: Final = 100
"""Different values of a container, each of which is searched for in some twenty spellings."""
# Escapes by character. Each table is about some encoders: all of the first JSON, with Go's, Gson's, .NET's, PHP's.
_IN_JSON: Final = {'"': '\\"', "\\": "\\\\"}
_IN_SAFE_JSON: Final = {**_IN_JSON, "<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_IN_CAPITAL_JSON: Final = {char: f"\\u{ord(char):04X}" for char in "\"&'<>"}
_JSON_TABLES: Final = (
    _IN_JSON,
    {**_IN_JSON, "/": "\\/"},
    _IN_SAFE_JSON,
    {**_IN_SAFE_JSON, "'": "\\u0027"},
    {**_IN_SAFE_JSON, "'": "\\u0027", "=": "\\u003d"},
    {**_IN_CAPITAL_JSON, "\\": "\\\\", "+": "\\u002B", "`": "\\u0060"},
    {**_IN_CAPITAL_JSON, "\\": "\\\\", "/": "\\/"},
)
_IN_HTML: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_HTML_TABLES: Final = (
    *({**_IN_HTML, "'": escape} for escape in ("'", "&#x27;", "&#39;", "&#039;", "&apos;")),
    {**_IN_HTML, '"': "&#34;", "'": "&#39;"},
    {**_IN_HTML, '"': "&#34;", "'": "&#39;", "+": "&#43;"},
    {**_IN_HTML, "'": "&#x27;", "/": "&#x2F;"},
    {**_IN_HTML, "'": "&#x27;", "`": "&#x60;", "=": "&#x3D;"},
)
# What encoders of URLs do otherwise: Python's, JavaScript's for components and for whole URLs, Go's for paths, those of
# paths after RFC 3986, of queries, and of forms.
_URL_VARIANTS: Final[Sequence[dict[str, str]]] = (
    {},
    *(dict(zip(chars, chars, strict=True)) for chars in ("/", "!'()*", "!'()*;,/?:@&=+$#", "$&+=:@", "!'()*,/;@$&+=:")),
    {" ": "+"},
    {" ": "+", "*": "*", "~": "%7E"},
)
_IN_URLS: Final = tuple(
    {**{chr(code): quote(chr(code), safe="") for code in range(0x20, 0x7F)}, **variant} for variant in _URL_VARIANTS
)
_URL_TABLES: Final = (
    *_IN_URLS,
    *({char: text.lower() if len(text) > 1 else text for char, text in table.items()} for table in _IN_URLS),
)
_TABLES: Final = tuple(str.maketrans(table) for table in ({}, *_JSON_TABLES, *_HTML_TABLES, *_URL_TABLES))


def list_spellings(value: bytes) -> Iterable[bytes]:
    """Return a value in ASCII as servers may spell it: as it is, in small letters as in the name of a header, and in
    JSON, HTML, URLs and Base64."""
    text = value.decode("ascii")
    spellings = {text.translate(table).encode() for table in _TABLES} | {value.lower()}
    for offset, mixed_chars in enumerate((0, 2, 3)):
        # A value is at one of three offsets of a longer text; characters that mix it with its neighbours are left out.
        core = base64.b64encode(bytes(offset) + value)[mixed_chars : (offset + len(value)) * 8 // 6]
        spellings |= {core, core.replace(b"+", b"-").replace(b"/", b"_")}
    return spellings
