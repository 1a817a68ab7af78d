"""The Responses API over a WebSocket: one connection with several streams, each of which responds in order."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from apis.accounts.charges import Charge
from apis.errors import (
    InvalidRequest,
    Overloaded,
    RateLimited,
    StackError,
    SteeringRefused,
    Unauthorized,
    Unsupported,
    error_to_body,
)
from apis.events import TERMINAL_EVENTS, ResponseStreamEvent
from apis.fair_share import Place
from apis.responses import CreateResponse, Session, Successor
from apis.sink import Sink, Stream
from apis.telemetry import NO_TRACE, SpanType, current_span, error_type_of, telemetry
from providers.common.fair_turns import REQUEST_WORK, calculate, current_turn
from providers.common.held_bytes import HELD_PLACES
from stack.http.context import HttpContext, Services, get_context, get_services
from stack.http.gates import unauthorized_error
from stack.http.metering import GrantedRequest, grant_request, open_charge
from stack.http.parsing import is_large, read_object, validate_request
from stack.http.peer import DRAIN_MESSAGE_TYPE, Peer, get_peer
from stack.http.request_record import WEBSOCKET, RequestRecord
from stack.http.sse import ApiDialect, encode_message, read_dialect, select_events
from stack.http.steering import accepted_message, failed_message, measure_posted, parse_steer
from stack.http.streams import SHUTTING_DOWN_MESSAGE

_log = logging.getLogger(__name__)

_MAX_RUNNING: Final = 16
_MAX_STREAMS: Final = 32
_MAX_QUEUED: Final = 64
_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_CLOSE_NORMAL: Final = 1000
_CLOSE_POLICY: Final = 1008
_CLOSE_SERVICE_RESTART: Final = 1012


async def serve_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Open the WebSocket of a request that has passed the gates, and serve it until it is closed."""
    context, services = get_context(scope), get_services(scope)
    stack, tenant = services.stack, context.tenant
    dialect = read_dialect(scope, stack.config.server.dialect)
    await receive()
    with services.shares.open_websocket(tenant):
        session = stack.responses.open_session(tenant=tenant)
        try:
            await send({"type": "websocket.accept", "headers": []})
            peer = get_peer(scope)
            handler = _SocketHandler(send, session, services, dialect, context, peer)
            if peer is not None:
                peer.cover_message = handler.cover_message
            await handler.run(receive)
        except OSError:
            _log.info("a client left before its WebSocket was open")
        finally:
            session.close()


class _ConnectionClosed(Exception):
    """The client closed its connection before the last event was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _CreateMessage:
    """One `response.create`; `stream_id` is '' for the default stream."""

    stream_id: str
    fields: dict[str, Any]
    size_bytes: int
    is_large: bool
    places: list[Place]
    """Places that the message holds among the bodies in progress."""
    successor: Successor | None = None
    """The response that no message asks for: it follows a steered one by itself."""


class _SocketHandler:
    """One connection. The requests of one stream run in order, those of different streams concurrently."""

    def __init__(
        self,
        send: Send,
        session: Session,
        services: Services,
        dialect: ApiDialect,
        context: HttpContext,
        peer: Peer | None,
    ) -> None:
        config = services.stack.config.server
        self._asgi_send = send
        self._write_text = None if peer is None else peer.write_text
        self._session = session
        self._tenant = context.tenant
        self._caller = context.caller
        self._authenticate_again = context.authenticate_again
        self._stack = services.stack
        self._shares = services.shares
        self._admission = services.admission
        self._add_salt = services.cache_salts.add_salt
        self._dialect: ApiDialect = dialect
        self._max_bytes = config.max_body_bytes
        self._max_age_s = config.max_websocket_age_s
        self._request_id = context.request_id
        self._route = context.request_record.route
        self._stream_ids: set[str] = set()
        self._arriving_places: list[Place] = []
        self._queue: list[_CreateMessage] = []
        self._running_tasks: dict[str, asyncio.Task[None]] = {}
        self._close_reason: StackError | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._finish_response = context.finish_request
        self._trace = current_span().headers

    async def run(self, receive: Receive) -> None:
        """Respond until either side closes, its key expires, it reaches its maximum age, or the server drains."""
        end = self._schedule_end()
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                if message["type"] == DRAIN_MESSAGE_TYPE:
                    self._begin_close(Overloaded(SHUTTING_DOWN_MESSAGE), _CLOSE_SERVICE_RESTART)
                else:  # without its text, the message itself stays until the next one comes
                    await self._receive_message(message.pop("text", None))
        except _ConnectionClosed:
            pass
        except asyncio.CancelledError:
            # the process ends: responses that run send their last event, then comes the close frame
            await self._cancel_tasks()
            with suppress(OSError):
                await self._asgi_send({"type": "websocket.close", "code": _CLOSE_SERVICE_RESTART})
            raise
        finally:
            end.cancel()
            await self._cancel_tasks()

    def cover_message(self, size_bytes: int) -> bool:
        """Count the bytes of a message that is not whole yet; return false where they find no place."""
        try:
            self._shares.cover_body(self._arriving_places, size_bytes, self._tenant)
        except Overloaded:
            return False
        return True

    def _schedule_end(self) -> asyncio.TimerHandle:
        """Close the connection at its maximum age, or when the key expires with which it was opened."""
        age_s, reason, code = self._max_age_s, _age_limit_error(self._max_age_s), _CLOSE_NORMAL
        expires_at = self._caller.expires_at
        if expires_at is not None and expires_at - time.time() < age_s:
            age_s, reason, code = expires_at - time.time(), unauthorized_error(), _CLOSE_POLICY
        return asyncio.get_running_loop().call_later(age_s, partial(self._begin_close, reason, code, is_announced=True))

    async def _cancel_tasks(self) -> None:
        for places in (self._arriving_places, *(create_message.places for create_message in self._queue)):
            _release(places)
        self._queue.clear()
        tasks = {*self._running_tasks.values(), *self._closing_tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _receive_message(self, text: str | None) -> None:
        """Queue one message until its stream is free. All are read at once, so that a disconnect is noticed."""
        stream_id = ""
        places, self._arriving_places = self._arriving_places, []
        try:
            await current_turn().wait(REQUEST_WORK)
            if text is None:
                raise InvalidRequest("A message is a text frame that holds one JSON object.", code="invalid_type")
            body, text = text.encode(), ""  # each of both may be most of what the process holds
            size_bytes, is_large_message = len(body), is_large(body)
            self._shares.cover_body(places, size_bytes, self._tenant)
            fields = await read_object(body)
            del body
            if fields.get("type") == "response.steer":
                await self._require_key()
                await self._steer(fields, is_large=is_large_message)
                _release(places)
                return
            stream_id = self._parse_stream_id(fields.pop("stream_id", None))
            await self._require_key()
            _check_type(fields.pop("type", None))
            if self._close_reason is not None:
                raise self._close_reason
            if len(self._queue) >= _MAX_QUEUED or self._queued_bytes() + size_bytes > self._max_bytes:
                raise RateLimited("Too many responses wait on this connection: let some of them end first.")
            self._queue.append(_CreateMessage(stream_id, fields, size_bytes, is_large_message, places))
        except asyncio.CancelledError:
            _release(places)
            raise
        except StackError as exc:
            _release(places)
            await self._send_error(exc, stream_id)
        self._start_queued()

    async def _require_key(self) -> None:
        """Raise Unauthorized, and close the connection when its running responses have ended, if its key has been
        revoked or has expired."""
        if self._authenticate_again is None or self._close_reason is not None:
            return
        try:
            self._caller = await self._authenticate_again()
        except Unauthorized as exc:
            self._begin_close(exc, _CLOSE_POLICY)
            raise

    async def _steer(self, fields: dict[str, Any], *, is_large: bool) -> None:
        """Send input to a running response. If it runs on this connection, its events say whether that is accepted."""
        try:
            if self._close_reason is not None:
                raise SteeringRefused(self._close_reason.message, code="response_not_active")
            request = await parse_steer(fields, is_large=is_large)
            if not await self._session.steer(request):
                await self._send(accepted_message(await self._stack.responses.steer(request, tenant=self._tenant)))
        except StackError as exc:
            await self._send(failed_message(exc, fields))

    def _queued_bytes(self) -> int:
        return sum(create_message.size_bytes for create_message in self._queue)

    def _parse_stream_id(self, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str) or not _STREAM_ID.fullmatch(value):
            message = "A 'stream_id' is 1 to 256 ASCII letters, digits, underscores, hyphens or periods."
            raise InvalidRequest(message, param="stream_id", code="invalid_stream_id")
        if value not in self._stream_ids and len(self._stream_ids) >= _MAX_STREAMS:
            message = f"A connection has at most {_MAX_STREAMS} values of 'stream_id': use one of them again."
            raise InvalidRequest(message, param="stream_id", code="websocket_stream_limit_reached")
        self._stream_ids.add(value)
        return value

    def _start_queued(self) -> None:
        """Start the oldest message of each stream that is free."""
        for create_message in [*self._queue]:
            if len(self._running_tasks) >= _MAX_RUNNING:
                return
            if create_message.stream_id not in self._running_tasks:
                self._queue.remove(create_message)
                self._running_tasks[create_message.stream_id] = asyncio.create_task(
                    self._respond_in_own_trace(create_message)
                )

    async def _respond_in_own_trace(self, create_message: _CreateMessage) -> None:
        links, attributes = [self._trace], {"http.route": self._route}
        with telemetry().open_span(SpanType.WEBSOCKET_CREATE, "", attributes, parent=NO_TRACE, links=links):
            await self._respond(create_message)

    async def _respond(self, create_message: _CreateMessage) -> None:
        started = False
        record = RequestRecord(self._request_id, WEBSOCKET, self._route)
        record.status = 200
        context = HttpContext(record, self._finish_response, {}, self._tenant, self._caller)
        context.places = create_message.places
        last: ResponseStreamEvent | None = None
        HELD_PLACES.set(context.places)
        previous_id = create_message.fields.get("previous_response_id")
        try:
            granted, generate = await self._parse_granted(create_message)
            create_message.fields.clear()  # the request has them now
            request, stream_id = granted.sent, create_message.stream_id
            charge = await open_charge(self._stack.accounts, self._caller, granted, create_message.size_bytes)
            context.charge = charge
            context.places.append(await self._admission.enter(self._tenant, request))
            obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
            respond = self._bind_respond(create_message, request, generate=generate, charge=charge)
            record.expect_response()
            encode = partial(encode_message, dialect=self._dialect, stream_id=stream_id, obfuscate=obfuscate)
            async with aclosing(Stream[ResponseStreamEvent](respond)) as batches:
                async for events in batches:
                    last = events[-1] if events[-1].type in TERMINAL_EVENTS else last
                    if not started:
                        started = True
                        record.observe(events[0])
                    for event in select_events(events, self._dialect):
                        await self._send(encode(event))
                    if self._write_text is not None:
                        batches.push_to(partial(self._push, self._write_text, encode))
            await self._queue_successor(stream_id)
        except _ConnectionClosed:
            _log.info("a client left its WebSocket early")
        except Exception as exc:  # noqa: BLE001 - the stream's outer edge
            if isinstance(previous_id, str):
                self._session.forget(previous_id, stream_id=create_message.stream_id)
            error = context.fail(exc)
            current_span().fail(error_type_of(error))
            if started:
                # the stream has already sent its own error event
                _log.info("a stream failed: %s", error.message)
            else:
                record.status = error.status
                await self._send_refusal(error, create_message)
        finally:
            if last is not None:
                record.observe(last)
            del self._running_tasks[create_message.stream_id]
            context.end()
            self._start_queued()

    def _bind_respond(
        self, create_message: _CreateMessage, request: CreateResponse, *, generate: bool, charge: Charge | None
    ) -> Callable[[Sink[ResponseStreamEvent]], Coroutine[Any, Any, None]]:
        """Return the call that puts the events of a response into its argument."""
        successor, successor_id = create_message.successor, None
        if successor is None:
            request = self._add_salt(request, self._tenant)
        else:  # its request has the salt of the one before
            successor_id = successor.response_id
        options = {"generate": generate, "charge": charge, "caller": self._caller, "successor_id": successor_id}
        return partial(self._session.respond, request, stream_id=create_message.stream_id, **options)

    async def _queue_successor(self, stream_id: str) -> None:
        """Put the response that is to follow the one which has just ended before all others of its stream."""
        successor = self._session.take_successor(stream_id=stream_id)
        if successor is not None:
            create_message = _CreateMessage(stream_id, {}, measure_posted(successor), False, [], successor)
            if self._close_reason is None:
                self._queue.insert(0, create_message)
            else:
                await self._send_refusal(self._close_reason, create_message)

    async def _send_refusal(self, error: StackError, create_message: _CreateMessage) -> None:
        """Send the error of a response that has not begun, or give the input back that it would have read."""
        if create_message.successor is None:
            await self._send_error(error, create_message.stream_id)
            return
        with suppress(_ConnectionClosed):
            for event in await self._session.fail_successor(create_message.successor, error):
                await self._send(encode_message(event, self._dialect, create_message.stream_id))

    def _push(
        self,
        write_text: Callable[[str], bool],
        encode: Callable[[ResponseStreamEvent], str],
        events: Sequence[ResponseStreamEvent],
    ) -> bool:
        """Send events without waiting; return true if the client is ready for more."""
        is_ready = True
        for event in select_events(events, self._dialect):
            is_ready = write_text(encode(event))
        return is_ready

    async def _parse_granted(self, create_message: _CreateMessage) -> tuple[GrantedRequest[CreateResponse], bool]:
        if create_message.successor is not None:
            return await grant_request(self._stack, self._caller, create_message.successor.request), True
        request, generate = await _parse_create(create_message)
        return await grant_request(self._stack, self._caller, request), generate

    def _begin_close(self, reason: StackError, code: int, *, is_announced: bool = False) -> None:
        """Refuse new messages, and close the connection when the running responses have ended, after an error event
        with the reason where `is_announced`."""
        if self._close_reason is None:
            self._close_reason = reason
            self._closing_tasks.add(asyncio.create_task(self._drain_and_close(reason, code, is_announced=is_announced)))

    async def _drain_and_close(self, reason: StackError, code: int, *, is_announced: bool) -> None:
        waiting, self._queue = self._queue, []
        for create_message in waiting:
            _release(create_message.places)
            await self._send_error(reason, create_message.stream_id)
        while self._running_tasks:
            await asyncio.wait(self._running_tasks.values())
        if is_announced:
            await self._send_error(reason, "")
        with suppress(OSError):
            await self._asgi_send({"type": "websocket.close", "code": code})

    async def _send_error(self, error: StackError, stream_id: str) -> None:
        """Send an error that belongs to no response."""
        detail: dict[str, Any] = error_to_body(error)["error"]
        if error.retry_after_s is not None:
            # clients read it from either place
            detail["message"] += f" Please try again in {error.retry_after_s:g}s."
            detail["headers"] = {"retry-after": f"{max(1, round(error.retry_after_s))}"}
        fields: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
        if stream_id:
            fields["stream_id"] = stream_id
        with suppress(_ConnectionClosed):
            await self._send(orjson.dumps(fields).decode())

    async def _send(self, text: str) -> None:
        try:
            await self._asgi_send({"type": "websocket.send", "text": text})
        except OSError:
            raise _ConnectionClosed from None


def _release(places: Sequence[Place]) -> None:
    for place in places:
        place.release()


def _check_type(kind: Any) -> None:
    if kind == "response.create":
        return
    if kind == "response.inject":
        raise Unsupported(f"'{kind}' is not offered by this server: let a response end, and follow it.", param="type")
    if kind is None:
        raise InvalidRequest("Missing required parameter: 'type'.", param="type", code="missing_required_parameter")
    raise InvalidRequest("Invalid value for 'type': expected 'response.create'.", param="type", code="invalid_value")


async def _parse_create(create_message: _CreateMessage) -> tuple[CreateResponse, bool]:
    """Return the request, and false if no model is to generate a response for it."""
    fields = {**create_message.fields}
    generate = fields.pop("generate", None)
    if not isinstance(generate, bool | None):
        raise InvalidRequest("Invalid type for 'generate': expected a boolean.", param="generate", code="invalid_type")
    if fields.get("background"):
        raise Unsupported("A WebSocket makes no background responses: create them by POST.", param="background")
    if isinstance(fields.get("stream"), bool | None):
        fields["stream"] = True  # a WebSocket has no other way to respond
    if create_message.is_large:
        return await calculate(validate_request, fields, CreateResponse), generate is not False
    return validate_request(fields, CreateResponse), generate is not False


def _age_limit_error(max_age_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"This WebSocket has been open for {max_age_s:g} s, which is the limit. Open a new one to go on.",
        code="websocket_connection_limit_reached",
    )
