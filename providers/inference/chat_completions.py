"""The wire of one OpenAI-compatible server: requests out, Steps of Deltas or vectors in, over aiohttp."""

import asyncio
import io
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import aiohttp
import msgspec
from pydantic import SecretStr

from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ModelNotFound, StackError, Unsupported, UpstreamError, UpstreamTimeout
from apis.inference import ChatRequest, Delta, Modality, Model, Step
from providers.inference.chat_body import Dialect, request_to_body, request_to_tokenize_body
from providers.inference.chat_chunks import ChatChunks
from providers.inference.chat_errors import Unavailable, response_to_error
from providers.inference.embedding_wire import answer_to_embeddings, request_to_embedding_body

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
LARGE_BODY_BYTES: Final = 256 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024
DRAIN_TIMEOUT_S: Final = 0.1
CANNOT_COUNT: Final = "cannot count tokens"


class ConnectTimeout(UpstreamTimeout):
    """No connection within the limit: another try is safe."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. The first token counts from the sending of the request; keep-alive comments are no tokens."""

    connect_s: float = 5
    headers_s: float = 60
    first_token_s: float = 120
    token_gap_s: float = 60


def open_session(connector: aiohttp.BaseConnector | None = None) -> aiohttp.ClientSession:
    """A session fit for upstreams: no environment proxies, no cookies, no bound on streams. Needs a running loop."""
    # Idle connections are given up before uvicorn's five seconds, lest a request meets one that is just being closed.
    return aiohttp.ClientSession(
        connector=connector or aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        auto_decompress=False,
    )


class Chunks(Protocol):
    """Reads an answer as ChatChunks does: see there."""

    failure: StackError | None
    finished: bool
    alive: bool

    def feed(self, read: bytes) -> list[Delta]:
        """The deltas that `read` completed."""
        ...

    def end(self) -> list[Delta]:
        """The last deltas, when the body ended cleanly."""
        ...


class Template(Protocol):
    """Who makes the prompt of the messages: how a chat is put to a server, and how its answer is to be read."""

    async def ask(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, Chunks]:
        """The path behind `base_url`, the body to POST and what reads the answer to it.

        `context_tokens` is what the server says of the model's context. Raises InvalidRequest for what cannot be put.
        """
        ...


class ServersTemplate:
    """The server makes the prompt: chat completions."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    async def ask(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, Chunks]:
        """See Template."""
        return "/chat/completions", request_to_body(request, self._dialect), ChatChunks(request)


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    created: float | None = None
    max_model_len: int | None = None
    context_length: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: int


_Answer = TypeVar("_Answer", _Models, _TokenCount)


class ChatCompletions:
    """One server at `base_url`, which ends where `/chat/completions` and `/models` begin (usually in `/v1`). Without
    a `template` the server has its own.

    Holds no connection of its own: `session` is the caller's, made by `open_session`. The key goes to `base_url` only;
    redirects are not followed.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        *,
        api_key: SecretStr | None = None,
        dialect: Dialect | None = None,
        template: Template | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session
        self._dialect = dialect or Dialect()
        self._template = template or ServersTemplate(self._dialect)
        self._context_tokens: dict[str, int | None] = {}
        self._timeouts = timeouts or Timeouts()
        self._connect_timeout = aiohttp.ClientTimeout(total=None, connect=self._timeouts.connect_s)
        self._key = api_key.get_secret_value() if api_key is not None else ""
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Step]:
        """As `Inference.chat`, tried once. Before the first step, Unavailable, ConnectTimeout and RateLimited mean
        that another try is safe."""
        path, asked, chunks = await self._template.ask(request, lambda: self._context(request.model))
        body = [asked]
        del asked
        loop, limits = asyncio.get_running_loop(), self._timeouts
        deadline = loop.time() + limits.first_token_s
        limit = f"first_token_timeout_s ({limits.first_token_s:g} s)"
        started = False
        # popped, and let go once sent: a long prompt's bytes are not to be kept for as long as the answer takes
        async with self._open("POST", f"{self.base_url}{path}", body.pop()) as response:
            await self._check_stream(response, request.model)
            watchdog = _Watchdog(response.content, loop)
            try:
                while not chunks.finished:
                    watchdog.arm(deadline, limit)
                    read = await _read(response.content, started=started)
                    watchdog.pause()
                    step = chunks.feed(read) if read else chunks.end()
                    if step:
                        yield step
                    if chunks.failure is not None:
                        raise chunks.failure if started or step else _retryable(chunks.failure)
                    if step or chunks.alive:
                        if not started:
                            limit = f"token_gap_timeout_s ({limits.token_gap_s:g} s)"
                            started = True
                        chunks.alive = False
                        deadline = loop.time() + limits.token_gap_s
                await _drain(response)
            finally:
                watchdog.stop()

    async def models(self, modalities: frozenset[Modality] | None = None) -> Sequence[Model]:
        """What the server lists. Raises UpstreamError when it does not."""
        found = _decoded(await self._ask("GET", f"{self.base_url}/models", None), _Models)
        return [
            Model(
                id=model.id,
                owned_by=model.owned_by or "upstream",
                created=int(model.created or 0),
                context_tokens=model.max_model_len or model.context_length,
                modalities=modalities,
            )
            for model in found.data
        ]

    async def _context(self, model: str) -> int | None:
        """The model's context as the server lists it, asked once, and again after a failure."""
        if model not in self._context_tokens:
            self._context_tokens |= {each.id: each.context_tokens for each in await self.models()}
        return self._context_tokens.get(model)

    async def count_tokens(self, request: ChatRequest) -> int:
        """The prompt's length by vLLM's /tokenize. Raises Unsupported where the server has none."""
        if self._dialect.engine != "vllm":
            raise Unsupported(f"This model's server {CANNOT_COUNT}.", param="model")
        body = request_to_tokenize_body(request, self._dialect)
        url = f"{self.base_url.removesuffix('/v1')}/tokenize"
        return _decoded(await self._ask("POST", url, body, request.model, CANNOT_COUNT), _TokenCount).count

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """As `Inference.embed`, tried once. What it takes is to be of a fit size: see `request_to_parts`."""
        body, lacking = request_to_embedding_body(request), "makes no embeddings"
        answer = await self._ask("POST", f"{self.base_url}/embeddings", body, request.model, lacking)
        return await asyncio.to_thread(answer_to_embeddings, answer, request)

    async def _ask(self, method: str, url: str, body: bytes | None, model: str = "", lacking: str = "") -> bytes:
        """A question with a short answer of JSON. `lacking` says of a server that does not know the path what it
        cannot do."""
        async with self._open(method, url, body) as response:
            if lacking and response.status in (404, 405, 501):
                error = await self._error(response, model)
                if not isinstance(error, ModelNotFound):
                    error = Unsupported(f"This model's server {lacking}.", param="model")
                raise error
            if response.status != 200:
                raise await self._error(response, model)
            return await self._read_body(response, MAX_BODY_BYTES)

    @asynccontextmanager
    async def _open(self, method: str, url: str, body: bytes | None) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send; wait for the headers. Leaving closes the connection at once, or keeps it where all was read."""
        limits = self._timeouts
        try:
            async with asyncio.timeout(limits.headers_s):
                response = await self._session.request(
                    method,
                    url,
                    # Large bodies go out in pieces, so that sending one does not hold up the streams of others.
                    data=io.BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body,
                    headers=self._headers,
                    allow_redirects=False,
                    timeout=self._connect_timeout,
                )
        except aiohttp.ConnectionTimeoutError as exc:
            what = f"connect_timeout_s ({limits.connect_s:g} s)"
            raise ConnectTimeout(f"The inference server could not be reached within {what}.") from exc
        except TimeoutError as exc:
            raise self._too_slow() from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Unavailable("The inference server could not be reached.") from exc
        del body
        try:
            yield response
        finally:
            response.release()

    def _too_slow(self) -> UpstreamTimeout:
        what = f"headers_timeout_s ({self._timeouts.headers_s:g} s)"
        return UpstreamTimeout(f"The inference server did not answer within {what}.")

    async def _check_stream(self, response: aiohttp.ClientResponse, model: str) -> None:
        if response.status != 200:
            raise await self._error(response, model)
        if response.content_type != "text/event-stream":
            raise UpstreamError("The inference server did not answer with an event stream.")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UpstreamError("The inference server sent a compressed stream, which was not asked for.")

    async def _error(self, response: aiohttp.ClientResponse, model: str) -> StackError:
        self._context_tokens.clear()
        body = await self._read_body(response, MAX_ERROR_BYTES)
        if self._key:
            body = body.replace(self._key.encode(), b"[key]")
        return response_to_error(response.status, body, response.headers, model)

    async def _read_body(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The body up to `limit` bytes; the rest of a longer one is left unread."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeouts.headers_s):
                while len(body) < limit and (read := await response.content.readany()):
                    body += read
        except TimeoutError as exc:
            raise self._too_slow() from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Unavailable("The connection to the inference server broke.") from exc
        return bytes(body[:limit])


def _decoded(answer: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent an answer that is not valid.") from exc


async def _read(content: aiohttp.StreamReader, *, started: bool) -> bytes:
    """What has come; empty at the clean end of the body."""
    try:
        return await content.readany()
    except (aiohttp.ClientError, OSError) as exc:
        error = UpstreamError if started else Unavailable
        raise error("The connection to the inference server broke before the answer ended.") from exc


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Take the end of the body that comes right behind the answer's, so that the connection can serve again."""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while await response.content.readany():
                pass


def _retryable(failure: StackError) -> StackError:
    """A stream that broke off before it said anything may be asked for again."""
    return Unavailable(failure.message) if type(failure) is UpstreamError else failure


class _Watchdog:
    """Ends a read that waits too long. One timer for the whole stream, because one per read costs as much as the read.

    Time spent in the consumer does not count: it is armed for the reads only.
    """

    def __init__(self, content: aiohttp.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        self._content = content
        self._loop = loop
        self._at = self._due = math.inf
        self._limit = ""
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, at: float, limit: str) -> None:
        """Let reads go on until the loop's time `at`; `limit` names the setting."""
        self._at = at
        self._limit = limit
        if at < self._due:
            self.stop()
            self._due = at
            self._timer = self._loop.call_at(at, self._fire)

    def pause(self) -> None:
        """No read is waiting."""
        self._at = math.inf

    def stop(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        at, self._due, self._timer = self._at, math.inf, None
        if self._loop.time() < at:
            if at < math.inf:
                self.arm(at, self._limit)
            return
        self._content.set_exception(UpstreamTimeout(f"The inference server sent no token within {self._limit}."))
