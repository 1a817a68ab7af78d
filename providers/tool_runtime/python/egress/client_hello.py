"""The first message of TLS: the name that a client asks for, read without taking part (RFC 8446, RFC 6066)."""

from dataclasses import dataclass
from typing import Final

MAX_HELLO_BYTES: Final = 32 * 1024
_HANDSHAKE_START: Final = bytes((22, 3))
"""Type of a record of the handshake, and the major version of TLS."""
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_ENCRYPTED_CLIENT_HELLO: Final = 0xFE0D
UNRECOGNIZED_NAME_ALERT: Final = bytes((21, 3, 1, 0, 2, 2, 112))
"""Record that ends a handshake because of its name."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The name in clear, in lower case and None where there is none, and whether another one is encrypted."""

    server_name: str | None
    has_encrypted_name: bool


class HelloReader:
    """Reads the hello at the beginning of a connection as its bytes come. None is read twice, however small the pieces
    and the records of TLS are. `data` has all bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._position = 0
        self._message = bytearray()

    def feed(self, data: bytes) -> ClientHello | None:
        """Return the hello, or None while more of it has to come. Raises ValueError for bytes that do not begin like
        TLS, and for a hello that could be read in two ways."""
        self.data += data
        while len(self._message) < 4 or len(self._message) < 4 + self._length:
            header = bytes(self.data[self._position : self._position + 5])
            if not _HANDSHAKE_START.startswith(header[:2]):
                raise ValueError("no record of a handshake")
            if len(header) < 5:
                return None
            begin, size = self._position + 5, int.from_bytes(header[3:], "big")
            if not size or begin + size > MAX_HELLO_BYTES:
                raise ValueError("the record is empty, or the hello too long")
            if len(self.data) < begin + size:
                return None
            self._message += self.data[begin : begin + size]
            self._position = begin + size
            if self._message[0] != _CLIENT_HELLO:
                raise ValueError("no hello")
        return _read_hello(bytes(self._message[4 : 4 + self._length]))

    @property
    def _length(self) -> int:
        return int.from_bytes(self._message[1:4], "big")


def _read_hello(message: bytes) -> ClientHello:
    fields = _Fields(message)
    fields.skip(2 + 32)
    fields.take(1)  # session id
    fields.take(2)  # cipher suites
    fields.take(1)  # compression methods
    extensions: dict[int, _Fields] = {}
    rest = _Fields(fields.take(2)) if fields.has_more else _Fields(b"")
    if fields.has_more:
        raise ValueError("the hello is longer than it says")
    while rest.has_more:
        number = rest.number(2)
        if number in extensions:
            raise ValueError("an extension comes twice")
        extensions[number] = _Fields(rest.take(2))
    name = _read_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else None
    return ClientHello(name, _ENCRYPTED_CLIENT_HELLO in extensions)


def _read_name(extension: "_Fields") -> str:
    names = _Fields(extension.take(2))
    kind, name = names.number(1), names.take(2)
    if kind or names.has_more or extension.has_more:
        raise ValueError("the hello has another name than that of one host")
    return name.decode("ascii").lower()


class _Fields:
    """Reader of fields one after the other. Raises ValueError where one is cut off."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def has_more(self) -> bool:
        return self._position < len(self._data)

    def skip(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise ValueError("a field is cut off")
        data, self._position = self._data[self._position : end], end
        return data

    def number(self, size: int) -> int:
        return int.from_bytes(self.skip(size), "big")

    def take(self, size_bytes: int) -> bytes:
        """Return a field whose length stands before it, in so many bytes."""
        return self.skip(self.number(size_bytes))
