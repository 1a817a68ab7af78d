"""Secrets of a container: the placeholders that its programs know, and their exchange on the way out and back."""

import base64
import binascii
import html
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from providers.tool_runtime.python.egress.settings import SecretValue

MIN_SECRET_CHARS: Final = 8
"""Shorter values could stand in any answer by chance, where they would be replaced."""
MAX_SECRETS_BYTES: Final = 64 * 1024
"""Length of all values of a container together: each answer of a host is searched for all of its values."""
_BASIC: Final = b"basic "
_ESCAPE: Final = re.compile(r"%[0-9A-F]{2}")

Headers = Sequence[tuple[bytes, bytes]]


class ContainerSecrets:
    """Placeholders by the names of their variables, which stay, and values by host and name, which may change."""

    def __init__(self, values: Iterable[SecretValue]) -> None:
        self._values: dict[str, dict[str, bytes]] = {}
        self._placeholders: dict[str, bytes] = {}
        self.update(values)

    def update(self, values: Iterable[SecretValue]) -> None:
        """Take the values in place of the former ones. A name that comes again keeps its placeholder."""
        self._values = {}
        for secret in values:
            self._values.setdefault(secret.domain, {})[secret.name] = secret.value.encode("ascii")
            if secret.name not in self._placeholders:
                self._placeholders[secret.name] = f"placeholder-{secrets.token_hex(16)}".encode()

    def variables(self) -> dict[str, str]:
        """Return the placeholders as variables of an environment."""
        return {name: placeholder.decode() for name, placeholder in self._placeholders.items()}

    def of_host(self, host: str) -> "HostSecrets | None":
        """Return the secrets that belong to a host; None where there are none."""
        values = self._values.get(host)
        if not values:
            return None
        return HostSecrets({self._placeholders[name]: value for name, value in values.items()})


class HostSecrets:
    """Values of the secrets of one host, by their placeholders."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        self._values = values
        needles = {form: name for name, value in values.items() for form in _spellings(value)}
        self._needles = sorted(needles.items(), key=lambda needle: -len(needle[0]))

    def put_in(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return headers with values in place of placeholders, also in the credentials of Basic authentication."""
        return [(name, self._put_into_value(value)) for name, value in headers]

    def redact(self, data: bytes) -> bytes:
        """Return bytes that came from the host with placeholders in place of values."""
        redacted, end = self.redact_before(data, len(data))
        return redacted + data[end:]

    def redact_before(self, data: bytes, limit: int) -> tuple[bytes, int]:
        """Return the bytes up to the end of the last value that begins before `limit`, redacted, and that end. Of
        values that begin at the same place, the longest counts."""
        pieces, end = list[bytes](), 0
        places = [data.find(needle) for needle, _ in self._needles]
        while (first := min((place for place in places if place >= 0), default=limit)) < limit:
            needle, placeholder = self._needles[places.index(first)]
            pieces += data[end:first], placeholder
            end = first + len(needle)
            for index, place in enumerate(places):
                if 0 <= place < end:
                    places[index] = data.find(self._needles[index][0], end)
        return b"".join(pieces), end

    def open_length(self, data: bytes) -> int:
        """Return the length of the longest end of the bytes with which a value may begin."""
        longest = 0
        for needle, _ in self._needles:
            position = max(0, len(data) - len(needle) + 1)
            while (position := data.find(needle[:1], position)) >= 0:
                if needle.startswith(data[position:]):
                    longest = max(longest, len(data) - position)
                    break
                position += 1
        return longest

    def _put_into_value(self, value: bytes) -> bytes:
        if value[: len(_BASIC)].lower() == _BASIC:
            try:
                decoded = base64.b64decode(value[len(_BASIC) :].strip(), validate=True)
            except binascii.Error:
                return self._replace(value)
            replaced = self._replace(decoded)
            return value if replaced == decoded else value[: len(_BASIC)] + base64.b64encode(replaced)
        return self._replace(value)

    def _replace(self, data: bytes) -> bytes:
        for placeholder, secret in self._values.items():
            data = data.replace(placeholder, secret)
        return data


class RedactedStream:
    """Redacts bytes that come in pieces; a value may be in several of them."""

    def __init__(self, secrets: HostSecrets) -> None:
        self._secrets = secrets
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on: all but an end with which a value may begin."""
        data, pieces = self._rest + data, list[bytes]()
        while True:
            limit = len(data) - self._secrets.open_length(data)
            redacted, end = self._secrets.redact_before(data, limit)
            pieces.append(redacted)
            if end <= limit:
                self._rest = data[limit:]
                return b"".join([*pieces, data[end:limit]])
            data = data[end:]

    def finish(self) -> bytes:
        """Return the rest after the last piece."""
        rest, self._rest = self._rest, b""
        return self._secrets.redact(rest)


def _spellings(value: bytes) -> set[bytes]:
    """Return a value as servers may spell it: as it is, and in JSON, URLs, HTML and Base64."""
    text = value.decode("ascii")
    in_json = json.dumps(text)[1:-1]
    in_urls = {quote(text, safe=""), quote(text), quote(text, safe="").replace("%20", "+")}
    in_urls |= {_ESCAPE.sub(lambda escape: escape[0].lower(), each) for each in in_urls}
    spellings = {each.encode() for each in {text, in_json, in_json.replace("/", "\\/"), html.escape(text), *in_urls}}
    for offset, mixed_chars in enumerate((0, 2, 3)):
        # A value is at one of three offsets of a longer text; characters that mix it with its neighbours are left out.
        core = base64.b64encode(bytes(offset) + value)[mixed_chars : (offset + len(value)) * 8 // 6]
        spellings |= {core, core.replace(b"+", b"-").replace(b"/", b"_")}
    return spellings
