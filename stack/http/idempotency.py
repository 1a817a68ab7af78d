"""Idempotency keys: a create that a client sends again, because the answer was lost, gets the first answer.

    TENANT/idempotency/NAME            the request body and the outcome; NAME is a hash of route and key
    TENANT/idempotent/NAME/NUMBER      the chunks of an answer that cannot be built again
    TENANT/idempotent_of/ID            the NAME under which the answer that shows the object ID is stored
    /idempotency_lease/TENANT/NAME     held by the process that handles the request

Of all requests with one key, one is handled, also after its client has disconnected, because the client may return;
the others wait for its answer. A response is replayed from where it is stored, so a deleted one is gone here too; the
events of a stream without a log are stored as they were sent. After an error the key is free again, and so is the key
of a process that died, unless the response that it generated is stored.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from apis.errors import IdempotencyKeyInUse, InvalidRequest, NotFound, StackError
from apis.storage.keys import is_safe_id, new_response_id
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import decode_record, delete_all, encode_record
from providers.common.fair_turns import calculate
from providers.common.state.scan import skipping_damaged
from stack.build import Stack
from stack.http.answers import client_disconnected_response
from stack.http.context import get_context, get_services
from stack.http.dispatch import dispatch
from stack.http.parsing import Body, find_header, is_large, read_object
from stack.http.peer import scope_without_peer
from stack.http.request_body import read_body
from stack.http.route_table import RouteTable, get_match, set_match
from stack.http.sse import DIALECT_HEADER, DONE_FRAME, KEEP_ALIVE_FRAME
from stack.http.streams import ClientDisconnected, run_while_connected

_log = logging.getLogger(__name__)

IDEMPOTENCY_KEY_HEADER: Final = "Idempotency-Key"
RAW_IDEMPOTENCY_HEADER: Final = IDEMPOTENCY_KEY_HEADER.lower().encode()
REPLAYED_HEADER: Final = (b"idempotent-replayed", b"true")
_RESPONSES_PATH: Final = "/responses"
_RETENTION_S: Final = 86_400.0
_LEASE_S: Final = 10.0
_WAIT_S: Final = 30.0
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 0.5
_MAX_STORED_BYTES: Final = 4 * 1024 * 1024
_CHUNK_BYTES: Final = 256 * 1024


class IdempotencyRecord(msgspec.Struct, omit_defaults=True):
    """The request that a key stands for. `outcome` is empty while it is handled; then the answer is the `stored`
    response, or `kept` as `chunk_count` chunks, or `unkept` because the request had `store: false`."""

    body_digest: str
    response_id: str = ""
    outcome: Literal["", "stored", "kept", "unkept"] = ""
    status: int = 200
    media_type: str = "application/json"
    chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class _KeyedRequest:
    """A create request with an idempotency key."""

    tenant: str
    route: str
    key_hash: str
    body: Body
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
        """True if the answer can be built again from the stored response."""
        return self.route == _RESPONSES_PATH and (self.background or not self.stream)


class Idempotency:
    """ASGI app inside the edge. A request without the header is dispatched unchanged."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        match = get_match(scope)
        if match.route is not None and match.route.keyed:
            if match.route.method == "DELETE":
                return self._delete(next(iter(match.params.values())), scope, receive, send)
            if find_header(scope, RAW_IDEMPOTENCY_HEADER) is not None:
                keys = [value for name, value in scope["headers"] if name == RAW_IDEMPOTENCY_HEADER]
                return self._create(match.route.path, parse_key(keys), scope, receive, send)
        return dispatch(scope, receive, send)

    async def _delete(self, object_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        await dispatch(scope, receive, send)
        try:
            await _delete_stored_response(get_services(scope).stack.kv_store, get_context(scope).tenant, object_id)
        except StackError as exc:
            _log.warning("the stored answer that shows a deleted object remains until it expires: %s", exc.message)

    async def _create(self, route: str, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        stack = get_services(scope).stack
        http = Request(scope, receive)
        request = await _read_keyed_request(http, route, key, await read_body(http))
        try:
            result = await run_while_connected(http, _claim_or_wait(stack, request))
        except ClientDisconnected:
            await client_disconnected_response()(scope, receive, send)
            return
        if isinstance(result, _Attempt):
            await result.execute(scope, receive, send)
        elif result.outcome == "stored":
            await self._replay_response(request, result.response_id, scope, receive, send)
        else:
            await (await _load_stored_response(stack.kv_store, request, result))(scope, receive, send)

    async def _replay_response(
        self, request: _KeyedRequest, response_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer with the response as it is now, or with its stream from the first event on."""
        if not request.is_retrievable:
            raise InvalidRequest(
                f"The events of the response that this {IDEMPOTENCY_KEY_HEADER} stands for are not kept: "
                f"it is '{response_id}'.",
                param=IDEMPOTENCY_KEY_HEADER,
                code="idempotent_stream_not_kept",
            )
        path = f"{_RESPONSES_PATH}/{response_id}"
        query = b"stream=true" if request.stream else b""
        get_scope: Scope = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query}
        set_match(get_scope, self._table.find("GET", path))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], REPLAYED_HEADER]}
            await send(message)

        await dispatch(get_scope, receive, answer)


class _Attempt:
    """The handling of a request by the holder of its key's lease, which is renewed meanwhile."""

    def __init__(
        self, kv: KVStore, request: _KeyedRequest, record: IdempotencyRecord, record_version: int, lease: Lease
    ) -> None:
        self._kv = kv
        self._request = request
        self._record = record
        self._record_version = record_version
        self._lease = lease
        self._settled_event = asyncio.Event()
        self._request_body_sent = False
        self._response_body: bytearray | None = bytearray()

    async def execute(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the handler answer, store the answer or its place, and send it."""
        self._context = get_context(scope)

        async def receive_request() -> Message:
            if not self._request_body_sent:
                self._request_body_sent = True
                return {"type": "http.request", "body": self._request.body, "more_body": False}
            # a disconnect must not stop the work before the outcome is stored: the client may return
            await self._settled_event.wait()
            return await receive()

        async def answer(message: Message) -> None:
            await self._observe_message(message)
            await send(message)

        try:
            self._context.response_id = self._record.response_id or None
            async with self._lease.renew_in_background():
                await dispatch(scope_without_peer(scope), receive_request, answer)
        finally:
            if not self._settled_event.is_set():
                await self._release_key()

    async def _observe_message(self, message: Message) -> None:
        """Take note of a message of the answer before it is sent."""
        record, request = self._record, self._request
        if message["type"] == "http.response.start":
            record.status = message["status"]
            record.media_type = dict(message["headers"]).get(b"content-type", b"").decode()
            if record.status < 300 and request.is_retrievable:
                record.outcome = "stored" if request.store else "unkept"
                await self._store_outcome(())
        elif record.status < 300 and not self._settled_event.is_set() and message["type"] == "http.response.body":
            self._append_body(message.get("body", b""))
            if not message.get("more_body", False):
                # an answer that cannot be stored is still sent to its client: the key is free then
                with suppress(StackError):
                    await self._store_outcome(self._build_chunk_ops())

    def _append_body(self, body: bytes) -> None:
        if self._response_body is not None and body != KEEP_ALIVE_FRAME:
            self._response_body += body
            if len(self._response_body) > _MAX_STORED_BYTES or not self._request.store:
                self._response_body = None

    def _build_chunk_ops(self) -> list[Op]:
        """Return the operations that store the answer, and its place under the id of the object that it shows."""
        record, request, body = self._record, self._request, self._response_body
        if body is None or (request.route == _RESPONSES_PATH and not body.endswith(DONE_FRAME)):
            record.outcome = "stored" if request.store else "unkept"
            return []
        chunks = [bytes(body[start : start + _CHUNK_BYTES]) for start in range(0, len(body), _CHUNK_BYTES)]
        record.outcome, record.chunk_count = "kept", len(chunks)
        ops: list[Op] = [Put(request.chunk_key(number), chunk, _RETENTION_S) for number, chunk in enumerate(chunks)]
        object_id = record.response_id or self._context.created_id
        if object_id:
            ops.append(Put(_object_key(request.tenant, object_id), request.key_hash.encode(), _RETENTION_S))
        return ops

    async def _store_outcome(self, ops: Sequence[Op]) -> None:
        put = Put(self._request.record_key, encode_record(self._record), _RETENTION_S, self._record_version)
        if not await self._lease.release([put, *ops], even_if_lost=True):
            _log.warning("an idempotency key was taken by another process, because this one was too slow")
        self._settled_event.set()

    async def _release_key(self) -> None:
        with suppress(StackError, LeaseLost):
            await self._lease.release([Delete(self._request.record_key, self._record_version)])


async def _claim_or_wait(stack: Stack, request: _KeyedRequest) -> "_Attempt | IdempotencyRecord":
    """Return the outcome for the key once there is one, or an attempt of this process. Raises InvalidRequest for a key
    of another body, and IdempotencyKeyInUse if the first request takes too long."""
    kv, loop = stack.kv_store, asyncio.get_running_loop()
    deadline, pause_s = loop.time() + _WAIT_S, _MIN_POLL_S
    while loop.time() < deadline:
        entry, lease = await kv.get_many([request.record_key, request.lease_key])
        record = None if entry is None else decode_record(entry, IdempotencyRecord)
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
        if record is None:
            await kv.require_room(request.tenant)
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
    """Return True if the response can be replayed although no outcome is stored: it is a background response, or the
    process that generated it has stopped."""
    if not record.response_id or not (request.background or lease is None):
        return False
    try:
        response = await stack.responses.get(record.response_id, tenant=request.tenant)
    except NotFound:
        return False
    return request.background or response.status in ("completed", "incomplete")


async def _claim_key(kv: KVStore, request: _KeyedRequest, entry: Entry | None) -> _Attempt | None:
    response_id = new_response_id() if request.route == _RESPONSES_PATH else ""
    record = IdempotencyRecord(request.body_digest, response_id)
    put = Put(request.record_key, encode_record(record), _RETENTION_S, ABSENT if entry is None else entry.version)
    lease = Lease(kv, request.lease_key, _LEASE_S)
    versions = await lease.acquire([put])
    return None if versions is None else _Attempt(kv, request, record, versions[0], lease)


async def _load_stored_response(kv: KVStore, request: _KeyedRequest, record: IdempotencyRecord) -> Response:
    if record.outcome == "unkept":
        raise InvalidRequest(
            f"What was sent with this {IDEMPOTENCY_KEY_HEADER} has been answered, "
            "and nothing of it was kept (`store: false`).",
            param=IDEMPOTENCY_KEY_HEADER,
            code="idempotent_answer_not_kept",
        )
    entries = await kv.get_many([request.chunk_key(number) for number in range(record.chunk_count)])
    chunks = [entry.value for entry in entries if entry is not None]
    if len(chunks) < record.chunk_count:
        raise NotFound(f"What was made with this {IDEMPOTENCY_KEY_HEADER} has been deleted.")
    headers = {"content-type": record.media_type, "cache-control": "no-cache", REPLAYED_HEADER[0].decode(): "true"}
    return Response(b"".join(chunks), record.status, headers)


async def _delete_stored_response(kv: KVStore, tenant: str, object_id: str) -> None:
    """Delete the stored answer that shows an object which may have been deleted."""
    if not is_safe_id(object_id):
        return
    object_key = _object_key(tenant, object_id)
    entry = await kv.get(object_key)
    if entry is None:
        return
    with skipping_damaged(kv, object_key, "reference to an answer"):
        await delete_all(kv, f"{tenant}/idempotent/{entry.value.decode()}/", durable=True)
    await kv.write([Delete(object_key)])


async def _read_keyed_request(http: Request, route: str, key: bytes, body: Body) -> _KeyedRequest:
    tenant = get_context(http.scope).tenant
    name = hashlib.sha256(b"%b %b" % (route.encode(), key)).hexdigest()
    dialect = (find_header(http.scope, DIALECT_HEADER) or "").encode()
    fields = await read_object(body)
    hashing = hashlib.sha256(dialect + b"\0")
    if is_large(body):
        await calculate(hashing.update, body)
    else:
        hashing.update(body)
    flags = fields.get("stream") is True, fields.get("background") is True, fields.get("store") is not False
    return _KeyedRequest(tenant, route, name, body, hashing.hexdigest(), *flags)


def parse_key(keys: Sequence[bytes]) -> bytes:
    """Return the key of a request, which has at least one. Raises InvalidRequest."""
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) < 256 or not key.isascii() or not key.decode().isprintable():
        message = f"The header {IDEMPOTENCY_KEY_HEADER} is given once, as 1 to 255 printable ASCII characters."
        raise InvalidRequest(message, param=IDEMPOTENCY_KEY_HEADER, code="invalid_value")
    return key


def _object_key(tenant: str, object_id: str) -> str:
    return f"{tenant}/idempotent_of/{object_id}"
