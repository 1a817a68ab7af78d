"""The Responses API over a WebSocket: a connection that stays, lanes of responses on it, and what it remembers."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from openai.types.responses import ResponseStreamEvent
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from apis.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    StackError,
    Unsupported,
    error_to_body,
    internal_error,
)
from apis.responses import CreateResponse, Session
from stack.build import Stack
from stack.config import ServerConfig
from stack.http.parsing import BLOCKING_BYTES, check, read_object
from stack.http.request_record import WEBSOCKET, Visit
from stack.http.sse import Dialect, message, read_dialect
from stack.serving.socket_connection import DRAIN

_log = logging.getLogger(__name__)
Salted = Callable[[CreateResponse], CreateResponse]

_PATHS: Final = ("/v1/responses", "/responses")
GOING_AWAY: Final = "This server is shutting down. Try again: another one answers, or this one when it is back."
_MAX_RUNNING: Final = 16
_MAX_LANES: Final = 32
_MAX_WAITING: Final = 64
_LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_NORMAL: Final = 1000
_RESTART: Final = 1012


class WebSocketEndpoint:
    """An ASGI app for all the WebSockets of the app that it is in."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _PATHS:
            raise NotFound(f"There is no WebSocket at {scope['path'][:256]}.")
        routes = scope["app"].state.routes
        stack: Stack = routes.stack
        config = stack.config.server
        dialect = read_dialect(Headers(scope=scope), config.dialect)
        await receive()
        session = stack.responses.session(tenant=scope["tenant"])
        try:
            await send({"type": "websocket.accept", "headers": []})
            salted = partial(routes.salts.salted, tenant=scope["tenant"])
            socket = _Socket(send, session, salted, dialect, config, scope["request_id"])
            socket.tell = scope["tell"]
            await socket.run(receive)
        except OSError:
            _log.info("a client left before its WebSocket was open")
        finally:
            session.close()


class _Gone(Exception):
    """The client closed its connection before it was told all."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    """One `response.create`; lane '' is the default one."""

    lane: str
    fields: dict[str, Any]
    size: int


class _Socket:
    """One connection. What it is asked in one lane is answered in order, and side by side with other lanes."""

    def __init__(
        self, send: Send, session: Session, salted: Salted, dialect: Dialect, config: ServerConfig, request_id: str
    ) -> None:
        self._asgi_send = send
        self._session = session
        self._salted = salted
        self._dialect: Dialect = dialect
        self._max_bytes = config.max_body_bytes
        self._max_age_s = config.max_websocket_age_s
        self._request_id = request_id
        self._lanes: set[str] = set()
        self._waiting: list[_Ask] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: StackError | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self.tell: Callable[[Visit], None] = lambda _: None
        """Is told of each response when it is over, as of a visit of its own."""

    async def run(self, receive: Receive) -> None:
        """Answer until either side closes, or the connection is too old, or the server is to end."""
        age = asyncio.get_running_loop().call_later(self._max_age_s, self._end, _too_old(self._max_age_s), _NORMAL)
        try:
            while (told := await receive())["type"] != "websocket.disconnect":
                if told["type"] == DRAIN:
                    self._end(Overloaded(GOING_AWAY), _RESTART)
                else:
                    await self._take(told.get("text"))
        except _Gone:
            pass
        finally:
            age.cancel()
            self._waiting.clear()
            tasks = {*self._running.values(), *self._finishing}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _take(self, text: str | None) -> None:
        """One message. It is read at once, so that a client that leaves is seen, and answered when its lane is free."""
        lane = ""
        try:
            if text is None:
                raise InvalidRequest("A message is a text frame that holds one JSON object.", code="invalid_type")
            body = text.encode()
            fields = await read_object(body)
            lane = self._lane(fields.pop("stream_id", None))
            _check_type(fields.pop("type", None))
            if self._ending is not None:
                raise self._ending
            if len(self._waiting) >= _MAX_WAITING or self._waiting_bytes() + len(body) > self._max_bytes:
                raise RateLimited("Too many responses wait on this connection: let some of them end first.")
            self._waiting.append(_Ask(lane, fields, len(body)))
        except StackError as exc:
            await self._refuse(exc, lane)
        self._advance()

    def _waiting_bytes(self) -> int:
        return sum(ask.size for ask in self._waiting)

    def _lane(self, name: Any) -> str:
        if name is None:
            return ""
        if not isinstance(name, str) or not _LANE.fullmatch(name):
            message = "A 'stream_id' is 1 to 256 ASCII letters, digits, underscores, hyphens or periods."
            raise InvalidRequest(message, param="stream_id", code="invalid_stream_id")
        if name not in self._lanes and len(self._lanes) >= _MAX_LANES:
            message = f"A connection has at most {_MAX_LANES} values of 'stream_id': use one of them again."
            raise InvalidRequest(message, param="stream_id", code="websocket_stream_limit_reached")
        self._lanes.add(name)
        return name

    def _advance(self) -> None:
        """Begin what can begin: the oldest of each lane that is free."""
        for ask in [*self._waiting]:
            if len(self._running) >= _MAX_RUNNING:
                return
            if ask.lane not in self._running:
                self._waiting.remove(ask)
                self._running[ask.lane] = asyncio.create_task(self._answer(ask))

    async def _answer(self, ask: _Ask) -> None:
        told = False
        visit = Visit(self._request_id, WEBSOCKET, _PATHS[0])
        visit.status = 200
        events: Sequence[ResponseStreamEvent] = ()
        try:
            request, generate = await _read_create(ask)
            obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
            created = self._session.create(self._salted(request), lane=ask.lane, generate=generate)
            visit.asked()
            async with aclosing(created) as batches:
                async for events in batches:
                    if not told:
                        told = True
                        visit.told(events[-1])
                    for event in events:
                        await self._send(message(event, self._dialect, ask.lane, obfuscate=obfuscate))
        except _Gone:
            _log.info("a client left its WebSocket early")
        except Exception as exc:  # noqa: BLE001 - the stream's outer edge
            before = ask.fields.get("previous_response_id")
            if isinstance(before, str):
                self._session.forget(before, lane=ask.lane)
            error = exc if isinstance(exc, StackError) else self._bug(exc)
            visit.blame(error)
            if told:
                # the stream has already said so in its own terms
                _log.info("a stream failed: %s", error.message)
            else:
                visit.status = error.status
                await self._refuse(error, ask.lane)
        finally:
            if events:
                visit.told(events[-1])
            del self._running[ask.lane]
            self.tell(visit)
            self._advance()

    def _bug(self, exc: Exception) -> StackError:
        _log.error("a response on the WebSocket of request %s failed on a bug", self._request_id, exc_info=exc)
        return internal_error(self._request_id)

    def _end(self, why: StackError, code: int) -> None:
        """Begin nothing more, and close when nothing runs any more."""
        if self._ending is None:
            self._ending = why
            self._finishing.add(asyncio.create_task(self._finish(why, code)))

    async def _finish(self, why: StackError, code: int) -> None:
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            await self._refuse(why, ask.lane)
        while self._running:
            await asyncio.wait(self._running.values())
        if code == _NORMAL:
            await self._refuse(why, "")
        with suppress(OSError):
            await self._asgi_send({"type": "websocket.close", "code": code})

    async def _refuse(self, error: StackError, lane: str) -> None:
        """Tell of an error that belongs to no response."""
        detail: dict[str, Any] = error_to_body(error)["error"]
        if error.retry_after_s is not None:
            # clients read it from either place
            detail["message"] += f" Please try again in {error.retry_after_s:g}s."
            detail["headers"] = {"retry-after": f"{max(1, round(error.retry_after_s))}"}
        fields: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
        if lane:
            fields["stream_id"] = lane
        with suppress(_Gone):
            await self._send(orjson.dumps(fields).decode())

    async def _send(self, text: str) -> None:
        try:
            await self._asgi_send({"type": "websocket.send", "text": text})
        except OSError:
            raise _Gone from None


def _check_type(kind: Any) -> None:
    if kind == "response.create":
        return
    if kind == "response.steer":
        raise Unsupported("Responses cannot be steered here: let one end, and follow it.", param="type")
    if kind is None:
        raise InvalidRequest("Missing required parameter: 'type'.", param="type", code="missing_required_parameter")
    raise InvalidRequest("Invalid value for 'type': expected 'response.create'.", param="type", code="invalid_value")


async def _read_create(ask: _Ask) -> tuple[CreateResponse, bool]:
    """The request, and whether a model is to be asked."""
    fields = {**ask.fields}
    generate = fields.pop("generate", None)
    if not isinstance(generate, bool | None):
        raise InvalidRequest("Invalid type for 'generate': expected a boolean.", param="generate", code="invalid_type")
    if fields.get("background"):
        raise Unsupported("A WebSocket makes no background responses: create them by POST.", param="background")
    if isinstance(fields.get("stream"), bool | None):
        fields["stream"] = True  # whatever it says, there is no other way here
    if ask.size > BLOCKING_BYTES:
        return await asyncio.to_thread(check, fields, CreateResponse), generate is not False
    return check(fields, CreateResponse), generate is not False


def _too_old(max_age_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"This WebSocket has been open for {max_age_s:g} s, which is the limit. Open a new one to go on.",
        code="websocket_connection_limit_reached",
    )
