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
from stack.http.answers import client_disconnected_response
from stack.http.context import get_context, get_services
from stack.http.parsing import BLOCKING_BYTES, read_object
from stack.http.sse import DIALECT_HEADER, DONE_FRAME, KEEP_ALIVE_FRAME
from stack.http.streams import ClientDisconnected, run_while_connected
from stack.http.uploads import read_body

_log = logging.getLogger(__name__)

IDEMPOTENCY_KEY_HEADER: Final = "Idempotency-Key"
_RAW_HEADER: Final = IDEMPOTENCY_KEY_HEADER.lower().encode()
REPLAYED_HEADER: Final = (b"idempotent-replayed", b"true")
_CREATE_PATH: Final = re.compile(r"(?:/v1)?(/(?:responses|conversations|vector_stores|containers))")
_OBJECT_PATH: Final = re.compile(rf"{_CREATE_PATH.pattern}/([^/]+)")
_RESPONSES_PATH: Final = "/responses"
_RETENTION_S: Final = 86_400.0
_LEASE_S: Final = 10.0
_WAIT_S: Final = 30.0
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 0.5
_MAX_STORED_BYTES: Final = 4 * 1024 * 1024
_CHUNK_BYTES: Final = 256 * 1024


class IdempotencyRecord(msgspec.Struct, omit_defaults=True, rename={"body_digest": "body", "chunk_count": "pieces"}):
    """What a key stands for. `outcome` is empty while the answer is made; then the answer is the `stored` response,
    or `kept` in so many pieces, or `unkept` because nothing of it was to be stored."""

    body_digest: str
    response_id: str = ""
    outcome: Literal["", "stored", "kept", "unkept"] = ""
    status: int = 200
    media_type: str = "application/json"
    chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class _KeyedRequest:
    """A create with a key."""

    tenant: str
    route: str
    key_hash: str
    body: bytes
    body_digest: str
    stream: bool
    background: bool
    store: bool

    @property
    def record_key(self) -> str:
        return f"{self.tenant}/idempotency/{self.key_hash}"

    @property
    def lease_key(self) -> str:
        return f"/idempotency_lease/{self.tenant}/{self.key_hash}"

    def chunk_key(self, number: int) -> str:
        return f"{self.tenant}/idempotent/{self.key_hash}/{number:04d}"

    @property
    def is_retrievable(self) -> bool:
        """Whether the answer can be had again by asking for the response."""
        return self.route == _RESPONSES_PATH and (self.background or not self.stream)


_decode = msgspec.json.Decoder(IdempotencyRecord).decode
_encode = msgspec.json.Encoder().encode


class Idempotency:
    """ASGI middleware, within the edge. A request without the header passes untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "POST" and (route := _CREATE_PATH.fullmatch(scope["path"])):
            keys = [value for name, value in scope["headers"] if name == _RAW_HEADER]
            if keys:
                await self._create(route[1], _parse_key(keys), (scope, receive, send))
                return
        elif method == "DELETE" and (found := _OBJECT_PATH.fullmatch(scope["path"])):
            await self._app(scope, receive, send)
            try:
                await _delete_stored_response(get_services(scope).stack.kv_store, get_context(scope).tenant, found[2])
            except StackError as exc:
                _log.warning("an answer that told of what was deleted is kept until its time is up: %s", exc.message)
            return
        await self._app(scope, receive, send)

    async def _create(self, route: str, key: bytes, asgi: tuple[Scope, Receive, Send]) -> None:
        scope, receive, send = asgi
        stack = get_services(scope).stack
        http = Request(scope, receive)
        asked = await _read_keyed_request(http, route, key, await read_body(http, stack.config.server.max_body_bytes))
        try:
            found = await run_while_connected(receive, _claim_or_wait(stack, asked))
        except ClientDisconnected:
            await client_disconnected_response()(scope, receive, send)
            return
        if isinstance(found, _Attempt):
            await found.execute(self._app, asgi)
        elif found.outcome == "stored":
            await self._replay_response(asked, found.response_id, asgi)
        else:
            await (await _load_stored_response(stack.kv_store, asked, found))(scope, receive, send)

    async def _replay_response(
        self, request: _KeyedRequest, response_id: str, asgi: tuple[Scope, Receive, Send]
    ) -> None:
        """Answer by the response as it is now, or by its stream from the first event on."""
        scope, receive, send = asgi
        if not request.is_retrievable:
            raise InvalidRequest(
                f"The events of the response that this {IDEMPOTENCY_KEY_HEADER} stands for are not kept: "
                f"it is '{response_id}'.",
                param=IDEMPOTENCY_KEY_HEADER,
                code="idempotent_stream_not_kept",
            )
        path = f"{_RESPONSES_PATH}/{response_id}"
        query = b"stream=true" if request.stream else b""
        there = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], REPLAYED_HEADER]}
            await send(message)

        await self._app(there, receive, answer)


class _Attempt:
    """The right to make the answer of a key, renewed while it is made."""

    def __init__(self, kv: KVStore, request: _KeyedRequest, record: IdempotencyRecord, versions: Sequence[int]) -> None:
        self._kv = kv
        self._request = request
        self._record = record
        self._version, self._lease_version = versions
        self._settled_event = asyncio.Event()
        self._request_body_sent = False
        self._response_body: bytearray | None = bytearray()

    async def execute(self, app: ASGIApp, asgi: tuple[Scope, Receive, Send]) -> None:
        """Have it made, keep it or the place where it is, and send it."""
        scope, receive, send = asgi
        self._context = get_context(scope)

        async def told() -> Message:
            if not self._request_body_sent:
                self._request_body_sent = True
                return {"type": "http.request", "body": self._request.body, "more_body": False}
            # until there is something to come back for, the client's leaving stops nothing
            await self._settled_event.wait()
            return await receive()

        async def answer(message: Message) -> None:
            await self._observe_message(message)
            await send(message)

        renewing = asyncio.create_task(self._renew_lease())
        try:
            self._context.response_id = self._record.response_id or None
            await app(scope, told, answer)
        finally:
            renewing.cancel()
            if not self._settled_event.is_set():
                await self._release_key()

    async def _observe_message(self, message: Message) -> None:
        """What is sent, before it is sent."""
        record, asked = self._record, self._request
        if message["type"] == "http.response.start":
            record.status = message["status"]
            record.media_type = dict(message["headers"]).get(b"content-type", b"").decode()
            if record.status < 300 and asked.is_retrievable:
                record.outcome = "stored" if asked.store else "unkept"
                await self._store_outcome(())
        elif record.status < 300 and not self._settled_event.is_set() and message["type"] == "http.response.body":
            self._append_body(message.get("body", b""))
            if not message.get("more_body", False):
                # what cannot be kept is no reason to break off an answer that was given: the key is free then
                with suppress(StackError):
                    await self._store_outcome(self._build_chunk_ops())

    def _append_body(self, body: bytes) -> None:
        if self._response_body is not None and body != KEEP_ALIVE_FRAME:
            self._response_body += body
            if len(self._response_body) > _MAX_STORED_BYTES or not self._request.store:
                self._response_body = None

    def _build_chunk_ops(self) -> list[Op]:
        """What keeps the answer, under the id of what it tells of."""
        record, asked, kept = self._record, self._request, self._response_body
        whole = kept is not None and (asked.route != _RESPONSES_PATH or kept.endswith(DONE_FRAME))
        if kept is None or not whole:
            record.outcome = "stored" if asked.store else "unkept"
            return []
        pieces = [bytes(kept[start : start + _CHUNK_BYTES]) for start in range(0, len(kept), _CHUNK_BYTES)]
        record.outcome, record.chunk_count = "kept", len(pieces)
        ops: list[Op] = [Put(asked.chunk_key(number), piece, _RETENTION_S) for number, piece in enumerate(pieces)]
        object_id = record.response_id or self._context.created_id
        if object_id:
            ops.append(Put(_object_key(asked.tenant, object_id), asked.key_hash.encode(), _RETENTION_S))
        return ops

    async def _store_outcome(self, ops: Sequence[Op]) -> None:
        asked = self._request
        put = Put(asked.record_key, _encode(self._record), _RETENTION_S, self._version)
        if await self._kv.write([put, Delete(asked.lease_key), *ops]) is None:
            _log.warning("an idempotency key was taken by another process, because this one was too slow")
        self._settled_event.set()

    async def _release_key(self) -> None:
        with suppress(StackError):
            await self._kv.write(
                [Delete(self._request.record_key, self._version), Delete(self._request.lease_key)], durable=False
            )

    async def _renew_lease(self) -> None:
        while True:
            await asyncio.sleep(_LEASE_S / 3)
            with suppress(StackError):
                put = Put(self._request.lease_key, b"", _LEASE_S, self._lease_version)
                versions = await self._kv.write([put], durable=False)
                if versions is None:
                    return
                self._lease_version = versions[0]


async def _claim_or_wait(stack: Stack, request: _KeyedRequest) -> "_Attempt | IdempotencyRecord":
    """What the key's answer is, once there is one, or the right to make it. Raises InvalidRequest for a key of another
    body, and IdempotencyKeyInUse where it takes too long."""
    kv, loop = stack.kv_store, asyncio.get_running_loop()
    deadline, pause_s = loop.time() + _WAIT_S, _MIN_POLL_S
    while loop.time() < deadline:
        entry, lease = await kv.get_many([request.record_key, request.lease_key])
        record = None if entry is None else _read_record(entry)
        if record is not None and record.body_digest != request.body_digest:
            raise InvalidRequest(
                f"This {IDEMPOTENCY_KEY_HEADER} was sent before with another body: use a new one.",
                param=IDEMPOTENCY_KEY_HEADER,
                code="idempotency_key_reused",
            )
        if record is not None and (record.outcome or await _is_response_available(stack, request, record, lease)):
            if not record.outcome:
                record.outcome = "stored"
            return record
        if lease is None and (attempt := await _claim_key(kv, request, entry)):
            return attempt
        await asyncio.sleep(pause_s)
        pause_s = min(_MAX_POLL_S, 2 * pause_s)
    raise IdempotencyKeyInUse(
        f"What was first sent with this {IDEMPOTENCY_KEY_HEADER} is still being answered.", retry_after_s=1
    )


async def _is_response_available(
    stack: Stack, request: _KeyedRequest, record: IdempotencyRecord, lease: Entry | None
) -> bool:
    """Whether the response can be answered with before its maker has said so: it is made in the background, or whoever
    made it is no more."""
    if not record.response_id or not (request.background or lease is None):
        return False
    try:
        response = await stack.responses.get(record.response_id, tenant=request.tenant)
    except NotFound:
        return False
    return request.background or response.status in ("completed", "incomplete")


async def _claim_key(kv: KVStore, request: _KeyedRequest, entry: Entry | None) -> _Attempt | None:
    response_id = f"resp_{secrets.token_hex(16)}" if request.route == _RESPONSES_PATH else ""
    record = IdempotencyRecord(request.body_digest, response_id)
    ops = [
        Put(request.record_key, _encode(record), _RETENTION_S, ABSENT if entry is None else entry.version),
        Put(request.lease_key, b"", _LEASE_S, ABSENT),
    ]
    versions = await kv.write(ops, durable=False)
    return None if versions is None else _Attempt(kv, request, record, versions)


async def _load_stored_response(kv: KVStore, request: _KeyedRequest, record: IdempotencyRecord) -> Response:
    if record.outcome == "unkept":
        raise InvalidRequest(
            f"What was sent with this {IDEMPOTENCY_KEY_HEADER} has been answered, "
            "and nothing of it was kept (`store: false`).",
            param=IDEMPOTENCY_KEY_HEADER,
            code="idempotent_answer_not_kept",
        )
    found = await kv.get_many([request.chunk_key(number) for number in range(record.chunk_count)])
    pieces = [entry.value for entry in found if entry is not None]
    if len(pieces) < record.chunk_count:
        raise NotFound(f"What was made with this {IDEMPOTENCY_KEY_HEADER} has been deleted.")
    headers = {"content-type": record.media_type, "cache-control": "no-cache", REPLAYED_HEADER[0].decode(): "true"}
    return Response(b"".join(pieces), record.status, headers)


async def _delete_stored_response(kv: KVStore, tenant: str, object_id: str) -> None:
    """An object may have been deleted: then the answer that told of it goes too."""
    if not (object_id.isascii() and object_id.isprintable() and len(object_id) <= 256):
        return
    of_key = _object_key(tenant, object_id)
    entry = await kv.get(of_key)
    if entry is None:
        return
    rows = await kv.scan(f"{tenant}/idempotent/{entry.value.decode()}/")
    await kv.write([Delete(of_key), *(Delete(key) for key, _ in rows)])


async def _read_keyed_request(http: Request, route: str, key: bytes, body: bytes) -> _KeyedRequest:
    tenant = get_context(http.scope).tenant
    name = hashlib.sha256(b"%b %b" % (route.encode(), key)).hexdigest()
    dialect = http.headers.get(DIALECT_HEADER, "").encode()
    fields = await read_object(body)
    hashing = hashlib.sha256(dialect + b"\0")
    if len(body) > BLOCKING_BYTES:
        await asyncio.to_thread(hashing.update, body)
    else:
        hashing.update(body)
    flags = fields.get("stream") is True, fields.get("background") is True, fields.get("store") is not False
    return _KeyedRequest(tenant, route, name, body, hashing.hexdigest(), *flags)


def _parse_key(keys: Sequence[bytes]) -> bytes:
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) < 256 or not key.isascii() or not key.decode().isprintable():
        message = f"The header {IDEMPOTENCY_KEY_HEADER} is given once, as 1 to 255 printable ASCII characters."
        raise InvalidRequest(message, param=IDEMPOTENCY_KEY_HEADER, code="invalid_value")
    return key


def _read_record(entry: Entry) -> IdempotencyRecord:
    try:
        return _decode(entry.value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _object_key(tenant: str, object_id: str) -> str:
    return f"{tenant}/idempotent_of/{object_id}"
