"""Idempotency keys: a create that is sent again, because its answer was lost, is answered and not done again.

    TENANT/idempotency/NAME            which body the key stands for, and what came of it; NAME is made of route and key
    TENANT/idempotent/NAME/NUMBER      the pieces of an answer that can be had in no other way
    TENANT/idempotent_of/ID            the NAME under which the answer is kept that tells of the object ID
    /idempotency_lease/TENANT/NAME     that a process is at it; gone when the process is

Of all who bring a key one makes the answer, and goes on when its client leaves, which may come back; the others wait
for it. A response is answered again from where it is stored, so one that is deleted is gone here too; the events of a
stream that has no log are kept as they were sent. An error is no answer: its key is free again, and so is the key of
a process that died, unless the response that it was making is there.
"""

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import IdempotencyKeyInUse, InvalidRequest, NotFound, StackError
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from stack.build import Stack
from stack.http.edge import client_gone
from stack.http.parsing import BLOCKING_BYTES, read_object
from stack.http.sse import DIALECT_HEADER, DONE, KEEP_ALIVE
from stack.http.streams import ClientGone, while_connected
from stack.http.uploads import read_body

_log = logging.getLogger(__name__)

HEADER: Final = "Idempotency-Key"
_WIRE_HEADER: Final = HEADER.lower().encode()
REPLAYED: Final = (b"idempotent-replayed", b"true")
_CREATES: Final = re.compile(r"(?:/v1)?(/(?:responses|conversations|vector_stores|containers))")
_OBJECT: Final = re.compile(rf"{_CREATES.pattern}/([^/]+)")
_RESPONSES: Final = "/responses"
_KEPT_S: Final = 86_400.0
_LEASE_S: Final = 10.0
_WAIT_S: Final = 30.0
_SHORT_S: Final = 0.05
_LONG_S: Final = 0.5
_MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
_PIECE_BYTES: Final = 256 * 1024
_ID_IN_ANSWER: Final = re.compile(rb'"id":"([A-Za-z0-9_-]{1,256})"')


class Record(msgspec.Struct, omit_defaults=True):
    """What a key stands for. `outcome` is empty while the answer is made; then the answer is the `stored` response,
    or `kept` in so many pieces, or `unkept` because nothing of it was to be stored."""

    body: str
    response_id: str = ""
    outcome: Literal["", "stored", "kept", "unkept"] = ""
    status: int = 200
    media_type: str = "application/json"
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A create with a key."""

    tenant: str
    route: str
    name: str
    body: bytes
    digest: str
    stream: bool
    background: bool
    store: bool

    @property
    def record_key(self) -> str:
        return f"{self.tenant}/idempotency/{self.name}"

    @property
    def lease_key(self) -> str:
        return f"/idempotency_lease/{self.tenant}/{self.name}"

    def piece_key(self, number: int) -> str:
        return f"{self.tenant}/idempotent/{self.name}/{number:04d}"

    @property
    def by_reference(self) -> bool:
        """Whether the answer can be had again by asking for the response."""
        return self.route == _RESPONSES and (self.background or not self.stream)


_decode = msgspec.json.Decoder(Record).decode
_encode = msgspec.json.Encoder().encode


class Idempotency:
    """ASGI middleware, within the edge. A request without the header passes untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "POST" and (route := _CREATES.fullmatch(scope["path"])):
            keys = [value for name, value in scope["headers"] if name == _WIRE_HEADER]
            if keys:
                await self._create(route[1], _checked(keys), (scope, receive, send))
                return
        elif method == "DELETE" and (found := _OBJECT.fullmatch(scope["path"])):
            await self._app(scope, receive, send)
            try:
                await _forget(_stack(scope).kv_store, scope["tenant"], found[2])
            except StackError as exc:
                _log.warning("an answer that told of what was deleted is kept until its time is up: %s", exc.message)
            return
        await self._app(scope, receive, send)

    async def _create(self, route: str, key: bytes, asgi: tuple[Scope, Receive, Send]) -> None:
        scope, receive, send = asgi
        stack = _stack(scope)
        http = Request(scope, receive)
        asked = await _read(http, route, key, await read_body(http, stack.config.server.max_body_bytes))
        try:
            found = await while_connected(receive, _find(stack, asked))
        except ClientGone:
            await client_gone()(scope, receive, send)
            return
        if isinstance(found, _Attempt):
            await found.make(self._app, asgi)
        elif found.outcome == "stored":
            await self._retrieve(asked, found.response_id, asgi)
        else:
            await (await _kept_answer(stack.kv_store, asked, found))(scope, receive, send)

    async def _retrieve(self, asked: _Asked, response_id: str, asgi: tuple[Scope, Receive, Send]) -> None:
        """Answer by the response as it is now, or by its stream from the first event on."""
        scope, receive, send = asgi
        if not asked.by_reference:
            raise InvalidRequest(
                f"The events of the response that this {HEADER} stands for are not kept: it is '{response_id}'.",
                param=HEADER,
                code="idempotent_stream_not_kept",
            )
        path = f"{_RESPONSES}/{response_id}"
        query = b"stream=true" if asked.stream else b""
        there = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], REPLAYED]}
            await send(message)

        await self._app(there, receive, answer)


class _Attempt:
    """The right to make the answer of a key, renewed while it is made."""

    def __init__(self, kv: KVStore, asked: _Asked, record: Record, versions: Sequence[int]) -> None:
        self._kv = kv
        self._asked = asked
        self._record = record
        self._version, self._lease_version = versions
        self._settled = asyncio.Event()
        self._body_given = False
        self._kept: bytearray | None = bytearray()

    async def make(self, app: ASGIApp, asgi: tuple[Scope, Receive, Send]) -> None:
        """Have it made, keep it or the place where it is, and send it."""
        scope, receive, send = asgi

        async def told() -> Message:
            if not self._body_given:
                self._body_given = True
                return {"type": "http.request", "body": self._asked.body, "more_body": False}
            # until there is something to come back for, the client's leaving stops nothing
            await self._settled.wait()
            return await receive()

        async def answer(message: Message) -> None:
            await self._note(message)
            await send(message)

        renewing = asyncio.create_task(self._renew())
        try:
            await app({**scope, "response_id": self._record.response_id}, told, answer)
        finally:
            renewing.cancel()
            if not self._settled.is_set():
                await self._free()

    async def _note(self, message: Message) -> None:
        """What is sent, before it is sent."""
        record, asked = self._record, self._asked
        if message["type"] == "http.response.start":
            record.status = message["status"]
            record.media_type = dict(message["headers"]).get(b"content-type", b"").decode()
            if record.status < 300 and asked.by_reference:
                record.outcome = "stored" if asked.store else "unkept"
                await self._settle(())
        elif record.status < 300 and not self._settled.is_set() and message["type"] == "http.response.body":
            self._keep(message.get("body", b""))
            if not message.get("more_body", False):
                # what cannot be kept is no reason to break off an answer that was given: the key is free then
                with suppress(StackError):
                    await self._settle(self._pieces())

    def _keep(self, body: bytes) -> None:
        if self._kept is not None and body != KEEP_ALIVE:
            self._kept += body
            if len(self._kept) > _MAX_KEPT_BYTES or not self._asked.store:
                self._kept = None

    def _pieces(self) -> list[Op]:
        """What keeps the answer, under the id of what it tells of."""
        record, asked, kept = self._record, self._asked, self._kept
        whole = kept is not None and (asked.route != _RESPONSES or kept.endswith(DONE))
        if kept is None or not whole:
            record.outcome = "stored" if asked.store else "unkept"
            return []
        pieces = [bytes(kept[start : start + _PIECE_BYTES]) for start in range(0, len(kept), _PIECE_BYTES)]
        record.outcome, record.pieces = "kept", len(pieces)
        ops: list[Op] = [Put(asked.piece_key(number), piece, _KEPT_S) for number, piece in enumerate(pieces)]
        identity = record.response_id.encode() or (found[1] if (found := _ID_IN_ANSWER.search(kept)) else b"")
        return [*ops, Put(_of_key(asked.tenant, identity.decode()), asked.name.encode(), _KEPT_S)] if identity else ops

    async def _settle(self, ops: Sequence[Op]) -> None:
        asked = self._asked
        put = Put(asked.record_key, _encode(self._record), _KEPT_S, self._version)
        if await self._kv.write([put, Delete(asked.lease_key), *ops]) is None:
            _log.warning("an idempotency key was taken by another process, because this one was too slow")
        self._settled.set()

    async def _free(self) -> None:
        with suppress(StackError):
            await self._kv.write(
                [Delete(self._asked.record_key, self._version), Delete(self._asked.lease_key)], durable=False
            )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_LEASE_S / 3)
            with suppress(StackError):
                put = Put(self._asked.lease_key, b"", _LEASE_S, self._lease_version)
                versions = await self._kv.write([put], durable=False)
                if versions is None:
                    return
                self._lease_version = versions[0]


async def _find(stack: Stack, asked: _Asked) -> "_Attempt | Record":
    """What the key's answer is, once there is one, or the right to make it. Raises InvalidRequest for a key of another
    body, and IdempotencyKeyInUse where it takes too long."""
    kv, loop = stack.kv_store, asyncio.get_running_loop()
    deadline, pause_s = loop.time() + _WAIT_S, _SHORT_S
    while loop.time() < deadline:
        entry, lease = await kv.get_many([asked.record_key, asked.lease_key])
        record = None if entry is None else _read_record(entry)
        if record is not None and record.body != asked.digest:
            raise InvalidRequest(
                f"This {HEADER} was sent before with another body: use a new one.",
                param=HEADER,
                code="idempotency_key_reused",
            )
        if record is not None and (record.outcome or await _is_there(stack, asked, record, lease)):
            if not record.outcome:
                record.outcome = "stored"
            return record
        if lease is None and (attempt := await _claim(kv, asked, entry)):
            return attempt
        await asyncio.sleep(pause_s)
        pause_s = min(_LONG_S, 2 * pause_s)
    raise IdempotencyKeyInUse(f"What was first sent with this {HEADER} is still being answered.", retry_after_s=1)


async def _is_there(stack: Stack, asked: _Asked, record: Record, lease: Entry | None) -> bool:
    """Whether the response can be answered with before its maker has said so: it is made in the background, or whoever
    made it is no more."""
    if not record.response_id or not (asked.background or lease is None):
        return False
    try:
        response = await stack.responses.get(record.response_id, tenant=asked.tenant)
    except NotFound:
        return False
    return asked.background or response.status in ("completed", "incomplete")


async def _claim(kv: KVStore, asked: _Asked, entry: Entry | None) -> _Attempt | None:
    response_id = f"resp_{secrets.token_hex(16)}" if asked.route == _RESPONSES else ""
    record = Record(asked.digest, response_id)
    ops = [
        Put(asked.record_key, _encode(record), _KEPT_S, ABSENT if entry is None else entry.version),
        Put(asked.lease_key, b"", _LEASE_S, ABSENT),
    ]
    versions = await kv.write(ops, durable=False)
    return None if versions is None else _Attempt(kv, asked, record, versions)


async def _kept_answer(kv: KVStore, asked: _Asked, record: Record) -> Response:
    if record.outcome == "unkept":
        raise InvalidRequest(
            f"What was sent with this {HEADER} has been answered, and nothing of it was kept (`store: false`).",
            param=HEADER,
            code="idempotent_answer_not_kept",
        )
    found = await kv.get_many([asked.piece_key(number) for number in range(record.pieces)])
    pieces = [entry.value for entry in found if entry is not None]
    if len(pieces) < record.pieces:
        raise NotFound(f"What was made with this {HEADER} has been deleted.")
    headers = {"content-type": record.media_type, "cache-control": "no-cache", REPLAYED[0].decode(): "true"}
    return Response(b"".join(pieces), record.status, headers)


async def _forget(kv: KVStore, tenant: str, identity: str) -> None:
    """An object may have been deleted: then the answer that told of it goes too."""
    if not (identity.isascii() and identity.isprintable() and len(identity) <= 256):
        return
    of_key = _of_key(tenant, identity)
    entry = await kv.get(of_key)
    if entry is None:
        return
    rows = await kv.scan(f"{tenant}/idempotent/{entry.value.decode()}/")
    await kv.write([Delete(of_key), *(Delete(key) for key, _ in rows)])


async def _read(http: Request, route: str, key: bytes, body: bytes) -> _Asked:
    tenant: str = http.scope["tenant"]
    name = hashlib.sha256(b"%b %b" % (route.encode(), key)).hexdigest()
    dialect = http.headers.get(DIALECT_HEADER, "").encode()
    fields = await read_object(body)
    hashing = hashlib.sha256(dialect + b"\0")
    if len(body) > BLOCKING_BYTES:
        await asyncio.to_thread(hashing.update, body)
    else:
        hashing.update(body)
    flags = fields.get("stream") is True, fields.get("background") is True, fields.get("store") is not False
    return _Asked(tenant, route, name, body, hashing.hexdigest(), *flags)


def _checked(keys: Sequence[bytes]) -> bytes:
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) < 256 or not key.isascii() or not key.decode().isprintable():
        message = f"The header {HEADER} is given once, as 1 to 255 printable ASCII characters."
        raise InvalidRequest(message, param=HEADER, code="invalid_value")
    return key


def _read_record(entry: Entry) -> Record:
    try:
        return _decode(entry.value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _of_key(tenant: str, identity: str) -> str:
    return f"{tenant}/idempotent_of/{identity}"


def _stack(scope: Scope) -> Stack:
    return scope["app"].state.routes.stack
