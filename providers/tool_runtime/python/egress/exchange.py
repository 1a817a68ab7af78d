"""One request in HTTP/1.1 and its answer, read strictly and encoded again in both directions.

A connection carries one request: bytes that come after it are never read as another one.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import h11

from providers.common.fair_turns import TURN_WORK, TenantTurn
from providers.tool_runtime.python.egress.redaction import RedactedStream
from providers.tool_runtime.python.egress.secrets import HostSecrets

_MAX_HEAD_BYTES: Final = 16 * 1024
_MAX_ANSWER_HEAD_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 32 * 1024
CONNECTION_WORK: Final = TURN_WORK // 2
"""Work of a turn on one connection, apart from its bytes."""
_EVENT_WORK: Final = TURN_WORK // 32
"""Work on a part of a message in HTTP, which may have one byte."""
_BYTES_PER_WORK: Final = 8
_HOP_HEADERS: Final = frozenset(
    {b"connection", b"expect", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Headers of one connection. The exchange sets its own."""
_PLAIN_ENCODINGS: Final = (b"", b"identity")
_SECRET_HEADERS: Final = frozenset(
    {b"accept-encoding", b"a-im", b"range", b"if-range", b"request-range", b"x-ms-range"}
)
"""Headers that would let a host return a secret in a form that is not recognized."""
_PARTIAL_STATUSES: Final = (206, 226)
"""Answers of ranges and of differences (RFC 3229), in which a secret may be in parts."""
_PIECE_BYTES: Final = 4 * 1024
"""Bytes of an answer that are searched for secrets at a time, at least."""

Headers = list[tuple[bytes, bytes]]


class AnswerFailed(Exception):
    """The host did not answer in proper HTTP. The text is a sentence for the program."""


@dataclass(frozen=True, slots=True)
class ByteStream:
    """Both directions of a connection. `count` is called with the length of all that passes, and raises where that is
    too much. All work on it takes place in turns of the tenant."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    count: Callable[[int], None]
    turn: TenantTurn

    async def read(self) -> bytes:
        """Return some bytes; none at the end."""
        data = await self.reader.read(_READ_BYTES)
        self.count(len(data))
        await self.turn.wait(len(data) // _BYTES_PER_WORK)
        return data

    async def write(self, data: bytes) -> None:
        """Write bytes, and wait while the other side takes none."""
        self.writer.write(data)
        await self.writer.drain()


class ProgramConnection:
    """Connection of a program to the proxy, on which one request may come."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def read_request(self) -> h11.Request | None:
        """Return the head of the request; None where the program left. Raises h11.RemoteProtocolError."""
        event = await self._next_event()
        if not isinstance(event, h11.Request):
            return None
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError("The request has two lengths.")
        if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > _MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("The head of the request is too long.", error_status_hint=431)
        return event

    @property
    def early_bytes(self) -> bytes:
        """The bytes that came after a CONNECT and before its answer."""
        return self._http.trailing_data[0]

    async def accept(self) -> None:
        """Answer a CONNECT: the bytes that follow are for the host."""
        await self._send(h11.Response(status_code=200, reason=b"Connection established", headers=[]))

    async def refuse(self, status: int, text: str) -> None:
        """Answer with an error. Its text is the reason too, which clients of tunnels show. An answer that has begun is
        broken off."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.stream.writer.transport.abort()
            return
        body = f"{text}\n".encode()
        headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
        await self._send(
            h11.Response(status_code=status, reason=text.encode(), headers=[*headers, ("connection", "close")]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )

    async def exchange(
        self, request: h11.Request, host: ByteStream, authority: str, target: bytes, secrets: HostSecrets | None
    ) -> None:
        """Send the request to the host and its answer to the program. Raises AnswerFailed where the host does not
        answer, h11.RemoteProtocolError for a wrong body of the program or headers that values make too long, and
        OSError."""
        headers = _pick_headers(request.headers, _SECRET_HEADERS if secrets else ())
        if secrets is not None:
            try:
                headers = [*secrets.put_in(headers), (b"accept-encoding", b"identity")]
            except OverflowError:
                raise h11.RemoteProtocolError("The secrets are too long.", error_status_hint=431) from None
        framing = [(name, value) for name, value in request.headers if name == b"transfer-encoding"]
        upstream = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_ANSWER_HEAD_BYTES)
        own_headers = [(b"host", authority.encode()), *headers, *framing, (b"connection", b"close")]
        await host.write(_encode(upstream, h11.Request(method=request.method, target=target, headers=own_headers)))
        sending = asyncio.ensure_future(self._send_body(upstream, host))
        try:
            await self._return_answer(upstream, host, sending, secrets)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled():
                sending.exception()  # without this, asyncio logs it as never retrieved

    async def _send_body(self, upstream: h11.Connection, host: ByteStream) -> None:
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                await host.write(_encode(upstream, h11.Data(data=event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await host.write(_encode(upstream, h11.EndOfMessage()))
                return
            else:
                raise h11.RemoteProtocolError("The program left before its request was complete.")

    async def _return_answer(
        self,
        upstream: h11.Connection,
        host: ByteStream,
        sending: "asyncio.Future[None]",
        secrets: HostSecrets | None,
    ) -> None:
        redacted = RedactedStream(secrets.redaction) if secrets is not None else None
        while True:
            event = await self._next_of_answer(upstream, host, sending)
            if isinstance(event, h11.Response):
                if secrets is not None:
                    head_bytes = sum(len(name) + len(value) for name, value in event.headers)
                    await host.turn.wait(secrets.redaction.work(head_bytes))
                await self._send(_build_answer(event, secrets))
            elif isinstance(event, h11.Data):
                await self._return_data(bytes(event.data), host.turn, redacted)
            elif isinstance(event, h11.EndOfMessage):
                if redacted is not None and (rest := redacted.finish()):
                    await self._send(h11.Data(data=rest))
                await self._send(h11.EndOfMessage())
                return

    async def _return_data(self, data: bytes, turn: TenantTurn, redacted: RedactedStream | None) -> None:
        size = max(_PIECE_BYTES, redacted.longest) if redacted is not None else _READ_BYTES
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if redacted is not None:
                await turn.wait(redacted.work(piece))
                piece = redacted.feed(piece)
            if piece:
                await self._send(h11.Data(data=piece))

    async def _next_of_answer(
        self, upstream: h11.Connection, host: ByteStream, sending: "asyncio.Future[None]"
    ) -> h11.Event:
        """Return the next event of the answer. A request that failed on the program's side ends the wait."""
        try:
            while (event := upstream.next_event()) is h11.NEED_DATA:
                reading = asyncio.ensure_future(host.read())
                try:
                    pending = [reading] if sending.done() else [reading, sending]
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    if sending.done() and (error := sending.exception()) is not None and not isinstance(error, OSError):
                        raise error
                    data = await reading
                finally:
                    reading.cancel()
                upstream.receive_data(data)
        except h11.RemoteProtocolError as exc:
            if sending.done() and sending.exception() is exc:
                raise
            raise AnswerFailed("The host did not answer in proper HTTP.") from None
        if isinstance(event, h11.Event):
            await host.turn.wait(_EVENT_WORK)
            return event
        raise AnswerFailed("The host did not answer in proper HTTP.")

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self.stream.read())
        await self.stream.turn.wait(_EVENT_WORK)
        return event

    async def _send(self, *events: h11.Event) -> None:
        await self.stream.write(b"".join(_encode(self._http, event) for event in events))


def _encode(connection: h11.Connection, event: h11.Event) -> bytes:
    return connection.send(event) or b""


def _pick_headers(headers: Sequence[tuple[bytes, bytes]], others: Collection[bytes]) -> Headers:
    """Return the headers that are for the other end, without those of the connection and without `others`."""
    listed = {
        name.strip().lower() for field, value in headers if field == b"connection" for name in value.split(b",")
    } - {b"content-length"}
    return [
        (name, value)
        for name, value in headers
        if name not in _HOP_HEADERS and name not in listed and name not in others and not name.startswith(b"proxy-")
    ]


def _build_answer(answer: h11.Response, secrets: HostSecrets | None) -> h11.Response:
    """Return the head of an answer for the program. Raises AnswerFailed for a body in which no secret can be found."""
    is_chunked = any(name == b"transfer-encoding" for name, _ in answer.headers)
    headers, reason = _pick_headers(answer.headers, (b"content-length",) if is_chunked else ()), answer.reason
    if secrets is not None:
        encodings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
        if any(encoding not in _PLAIN_ENCODINGS for encoding in encodings):
            raise AnswerFailed("The host compressed its answer, which is not passed on because secrets belong to it.")
        if answer.status_code in _PARTIAL_STATUSES:
            raise AnswerFailed("The host sent a part alone, which is not passed on because secrets belong to it.")
        lines = [reason, *(part for header in headers if header[0] != b"content-length" for part in header)]
        reason, *parts = secrets.redaction.redact(b"\n".join(lines)).split(b"\n")
        headers = [*zip(parts[::2], parts[1::2], strict=True)]
    return h11.Response(status_code=answer.status_code, reason=reason, headers=[*headers, (b"connection", b"close")])
