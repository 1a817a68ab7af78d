"""Secrets of a container: the placeholders that its programs know, and their exchange on the way out and back."""

import asyncio
import base64
import binascii
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from providers.common.secret_spellings import MAX_SECRET_VALUES, MAX_SECRETS_BYTES
from providers.tool_runtime.python.egress.redaction import Redaction
from providers.tool_runtime.python.egress.settings import SecretValue

MIN_SECRET_CHARS: Final = 8
"""Shorter values could stand in any answer by chance, where they would be replaced."""
_MAX_HEADERS_BYTES: Final = 2 * MAX_SECRETS_BYTES
"""Length of the headers of a request with values in them: a placeholder may come often."""
_MAX_NAMES: Final = 1000
"""Names of a container whose placeholders are kept, with those that have no value any more."""
_BASIC: Final = b"basic "

Headers = Sequence[tuple[bytes, bytes]]


class ContainerSecrets:
    """Placeholders by the names of their variables, which stay, and values by host and name, which may change."""

    def __init__(self, values: Iterable[SecretValue]) -> None:
        self._placeholders: dict[str, bytes] = {}
        self._known_values: dict[bytes, bytes] = {}
        self._updating = asyncio.Lock()
        by_host = self._take(values)
        self._hosts = _build_hosts(by_host, self._known_values)

    async def update(self, values: Iterable[SecretValue]) -> None:
        """Take the values in place of the former ones. A name that comes again keeps its placeholder. Former values
        are still replaced in answers, because a host may have kept one, as long as there is room for them: an answer
        is searched for each. To prepare the search takes long, and is done in a thread."""
        async with self._updating:
            by_host = self._take(values)
            self._hosts = await asyncio.to_thread(_build_hosts, by_host, self._known_values)

    def _take(self, values: Iterable[SecretValue]) -> dict[str, dict[bytes, bytes]]:
        """Return the values by host and placeholder, and keep them all, with former ones, as known."""
        by_host: dict[str, dict[bytes, bytes]] = {}
        current = dict[bytes, bytes]()
        names = set[str]()
        for secret in values:
            names.add(secret.name)
            if secret.name not in self._placeholders:
                self._placeholders[secret.name] = f"placeholder-{secrets.token_hex(16)}".encode()
            placeholder, value = self._placeholders[secret.name], secret.value.encode("ascii")
            by_host.setdefault(secret.domain, {})[placeholder] = value
            current[value] = placeholder
        former = [value for value in self._known_values if value not in current]  # the newest come first
        room = MAX_SECRETS_BYTES
        for value in former[:MAX_SECRET_VALUES]:
            if (room := room - len(value)) >= 0:
                current[value] = self._known_values[value]
        self._known_values = current
        unused = [name for name in self._placeholders if name not in names]
        for name in unused[: max(0, len(self._placeholders) - _MAX_NAMES)]:  # the oldest come first
            del self._placeholders[name]
        return by_host

    def variables(self) -> dict[str, str]:
        """Return the placeholders as variables of an environment."""
        return {name: placeholder.decode() for name, placeholder in self._placeholders.items()}

    def of_host(self, host: str) -> "HostSecrets | None":
        """Return the secrets that belong to a host; None where there are none."""
        return self._hosts.get(host)


def _build_hosts(
    by_host: Mapping[str, Mapping[bytes, bytes]], known_values: Mapping[bytes, bytes]
) -> dict[str, "HostSecrets"]:
    redaction = Redaction(known_values)
    return {host: HostSecrets(own, redaction) for host, own in by_host.items()}


class HostSecrets:
    """Values of the secrets of one host, by their placeholders. Its answers are searched for all secrets of the
    container, since another host of the same service may have got one."""

    def __init__(self, values: Mapping[bytes, bytes], redaction: Redaction) -> None:
        self._values = values
        self.redaction = redaction

    def without_values(self) -> "HostSecrets":
        """Return what treats answers alike, and puts no value into a request."""
        return HostSecrets({}, self.redaction)

    def put_in(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return headers with values in place of placeholders, also in the credentials of Basic authentication. Raises
        OverflowError where they become too long."""
        sent_headers, room = list[tuple[bytes, bytes]](), _MAX_HEADERS_BYTES
        for name, value in headers:
            sent_headers.append((name, self._put_into_value(value, room)))
            room -= len(sent_headers[-1][1])
        return sent_headers

    def _put_into_value(self, value: bytes, room: int) -> bytes:
        if value[: len(_BASIC)].lower() == _BASIC:
            try:
                decoded = base64.b64decode(value[len(_BASIC) :].strip(), validate=True)
            except binascii.Error:
                return self._replace(value, room)
            replaced = self._replace(decoded, room)
            return value if replaced == decoded else value[: len(_BASIC)] + base64.b64encode(replaced)
        return self._replace(value, room)

    def _replace(self, data: bytes, room: int) -> bytes:
        if sum(data.count(placeholder) * len(secret) for placeholder, secret in self._values.items()) > room:
            raise OverflowError
        for placeholder, secret in self._values.items():
            data = data.replace(placeholder, secret)
        return data
