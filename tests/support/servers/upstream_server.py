"""An inference server for tests: raw TCP, so that it can break HTTP and event streams at any byte.

    async with UpstreamServer(stream(text_chunks("Hel", "lo"))) as upstream:
        ...                                     # ask upstream.base_url
    assert upstream.received[0].json["stream"]

Each POST to /chat/completions or /completions plays the next answer, the last one again and again. An answer is a
sequence of acts: bytes are sent as they are; the others are below. Without CUT or RESET at its end the connection stays
open for more.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self


@dataclass(frozen=True)
class Wait:
    """Go on when the test sets the event."""

    event: asyncio.Event


@dataclass(frozen=True)
class Repeat:
    """Send these bytes, with pauses, until the client leaves."""

    data: bytes
    pause_s: float = 0.0


@dataclass(frozen=True)
class _Act:
    name: str


CUT: Final = _Act("cut")
"""Close the connection as one does who has nothing more to say."""
RESET: Final = _Act("reset")
"""Close it with a TCP reset."""
HANG: Final = _Act("hang")
"""Say nothing more, and wait for the client to leave."""

Act = bytes | Wait | Repeat | _Act
Answer = Sequence[Act]
Chunk = dict[str, Any]


@dataclass(frozen=True)
class Received:
    """A request as it came in. Header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class UpstreamServer:
    """Use as an async context manager. `left` is set when a client leaves in the middle of an answer."""

    def __init__(self, *answers: Answer, models: Iterable[str] = ("fake-model",), port: int = 0) -> None:
        self.received: list[Received] = []
        self.left = asyncio.Event()
        self.connections = 0
        self.base_url = ""
        self.routes: dict[str, Answer | Callable[[Received], Answer]] = {
            "/v1/models": json_answer({"object": "list", "data": [_model(name) for name in models]}),
            "/tokenize": json_answer({"count": 5, "max_model_len": 4096, "tokens": [1, 2, 3, 4, 5]}),
        }
        self._answers = list(answers)
        self._port = port
        self._arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    def then(self, *answers: Answer) -> None:
        """Add answers after the present ones."""
        self._answers.extend(answers)

    async def until_received(self, count: int) -> None:
        """Wait until that many requests have come."""
        while len(self.received) < count:
            self._arrived.clear()
            await self._arrived.wait()

    @property
    def chats(self) -> list[Received]:
        """The chat requests received."""
        return [request for request in self.received if request.path.endswith("/chat/completions")]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening, and drop all clients."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for client in tuple(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        self.connections += 1
        try:
            while (request := await _receive(reader)) is not None:
                self.received.append(request)
                self._arrived.set()
                if not await self._play(self._answer(request), reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._clients.discard(task)
            writer.close()

    def _answer(self, request: Received) -> Answer:
        if request.path in self.routes:
            answer = self.routes[request.path]
            return answer(request) if callable(answer) else answer
        if request.path.endswith("/completions") and self._answers:
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return json_answer({"detail": "Not Found"}, status=404)

    async def _play(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Play the answer, and return true if the connection may serve another request."""
        for act in answer:
            if isinstance(act, bytes):
                writer.write(act)
                await writer.drain()
            elif isinstance(act, Wait):
                await act.event.wait()
            elif isinstance(act, Repeat):
                await _repeat(act, reader, writer)
                self.left.set()
                return False
            elif act is HANG:
                await reader.read(1)
                self.left.set()
                return False
            else:
                if act is RESET:
                    await _reset(writer)
                return False
        return True


async def _repeat(act: Repeat, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        writer.write(act.data)
        await writer.drain()
        await asyncio.sleep(act.pause_s)


async def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _receive(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body)


# --- answers ---------------------------------------------------------------------------------------------------------


def head(status: int = 200, content_type: str = "text/event-stream", headers: Mapping[str, str] | None = None) -> bytes:
    """Status line and headers of an answer whose body follows in HTTP chunks."""
    lines = {"content-type": content_type, "transfer-encoding": "chunked", **(headers or {})}
    return _head(status, lines)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


def http_chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_HTTP_CHUNK: Final = b"0\r\n\r\n"


def event(chunk: Chunk | str) -> bytes:
    """One server-sent event."""
    return f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode()


DONE: Final = event("[DONE]")


def stream(chunks: Iterable[Chunk | str], *, done: bool = True) -> list[Act]:
    """A whole and proper answer; every event in an HTTP chunk of its own."""
    events = [event(chunk) for chunk in chunks] + ([DONE] if done else [])
    return [head(), *(http_chunk(data) for data in events), LAST_HTTP_CHUNK]


def json_answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer with its length."""
    return plain_answer(json.dumps(body).encode(), status, {"content-type": "application/json", **(headers or {})})


def plain_answer(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer of any kind with its length."""
    lines = {"content-length": str(len(body)), **(headers or {})}
    return [_head(status, lines) + body]


def error_answer(status: int, message: str = "no", headers: Mapping[str, str] | None = None, **detail: Any) -> Answer:
    """An error as vLLM words it."""
    error = {"message": message, "type": "Error", "param": None, "code": status, **detail}
    return json_answer({"error": error}, status, headers)


# --- chunks ----------------------------------------------------------------------------------------------------------


def delta_chunk(finish_reason: str | None = None, *, logprobs: Any = None, **delta: Any) -> Chunk:
    """A chunk as vLLM sends it."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage_chunk(prompt_tokens: int = 11, completion_tokens: int = 7, **details: Any) -> Chunk:
    """Return the chunk that follows the last, without choices."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def call_chunk(
    index: int, arguments: str | None = None, *, call_id: str | None = None, name: str | None = None
) -> Chunk:
    """A part of a tool call. Only what is given is there."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call: dict[str, Any] = {"index": index, "function": function}
    if call_id is not None:
        call |= {"id": call_id, "type": "function"}
    return delta_chunk(tool_calls=[call])


def text_chunks(*texts: str, reasoning: Iterable[str] = (), finish_reason: str = "stop") -> list[Chunk]:
    """A whole answer of text."""
    return [
        delta_chunk(role="assistant", content=""),
        *(delta_chunk(reasoning=text) for text in reasoning),
        *(delta_chunk(content=text) for text in texts),
        delta_chunk(finish_reason, content=""),
        usage_chunk(),
    ]


def call_chunks(name: str, *arguments: str, call_id: str = "call_1") -> list[Chunk]:
    """A whole answer of one tool call."""
    return [
        delta_chunk(role="assistant", content=""),
        call_chunk(0, "", call_id=call_id, name=name),
        *(call_chunk(0, text) for text in arguments),
        delta_chunk("tool_calls", content=""),
        usage_chunk(),
    ]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096}
