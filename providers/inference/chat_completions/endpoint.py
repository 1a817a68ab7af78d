"""The wire of one OpenAI-compatible server: requests out, Steps of Deltas or vectors in, over HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
from pydantic import SecretStr

from apis.chat import ChatRequest
from apis.deltas import Delta, Step
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ModelNotFound, StackError, Unsupported, UpstreamError, UpstreamTimeout
from apis.inference import Modality, Model
from apis.telemetry import TRACE
from providers.inference.chat_completions.body import Dialect, request_to_body, request_to_tokenize_body
from providers.inference.chat_completions.chunks import ChatChunks
from providers.inference.chat_completions.embeddings import answer_to_embeddings, request_to_embedding_body
from providers.inference.chat_completions.errors import Unavailable, response_to_error
from providers.inference.http.client import ConnectTimedOut, HttpClient, headers_to_bytes
from providers.inference.http.connection import Answer, HttpFailed

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024
DRAIN_TIMEOUT_S: Final = 0.1
CANNOT_COUNT: Final = "cannot count tokens"
TOKENIZE: Final = "/tokenize"
"""vLLM has it beside `/v1`, not in it."""


class ConnectTimeout(UpstreamTimeout):
    """No connection within the limit: another try is safe."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. The first token counts from the sending of the request; keep-alive comments are no tokens."""

    connect_s: float = 5
    headers_s: float = 60
    first_token_s: float = 120
    token_gap_s: float = 60


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


_Told = TypeVar("_Told", _Models, _TokenCount)


class ChatCompletions:
    """One server at `base_url`, which ends where `/chat/completions` and `/models` begin (usually in `/v1`). Without
    a `template` the server has its own.

    Holds no connection of its own: `http` is the caller's. The key goes to `base_url` only;
    redirects are not followed.
    """

    def __init__(
        self,
        base_url: str,
        http: HttpClient,
        *,
        api_key: SecretStr | None = None,
        dialect: Dialect | None = None,
        template: Template | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = http
        self._dialect = dialect or Dialect()
        self._template = template or ServersTemplate(self._dialect)
        self._context_tokens: dict[str, int | None] = {}
        self._timeouts = timeouts or Timeouts()
        self._key = api_key.get_secret_value() if api_key is not None else ""
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._headers = headers_to_bytes(headers)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Step]:
        """As `Inference.chat`, tried once. Before the first step, Unavailable, ConnectTimeout and RateLimited mean
        that another try is safe."""
        path, asked, chunks = await self._template.ask(request, lambda: self._context(request.model))
        body = [asked]
        del asked
        now, limits = asyncio.get_running_loop().time, self._timeouts
        deadline = now() + limits.first_token_s
        started = False
        # popped, and let go once sent: a long prompt's bytes are not to be kept for as long as the answer takes
        answer = await self._send("POST", path, body.pop())
        try:
            await self._check_stream(answer, request.model)
            while not chunks.finished:
                try:
                    if not answer.ready:
                        await answer.more(deadline)
                    read = answer.take()
                except TimeoutError as exc:
                    raise self._no_token(started=started) from exc
                except HttpFailed as exc:
                    error = UpstreamError if started else Unavailable
                    raise error("The connection to the inference server broke before the answer ended.") from exc
                step = chunks.feed(read) if read else chunks.end()
                if step:
                    yield step
                if chunks.failure is not None:
                    raise chunks.failure if started or step else _retryable(chunks.failure)
                if step or chunks.alive:
                    started = True
                    chunks.alive = False
                    deadline = now() + limits.token_gap_s
            await _drain(answer)
        finally:
            self._http.release(answer)

    async def models(self, modalities: frozenset[Modality] | None = None) -> Sequence[Model]:
        """What the server lists. Raises UpstreamError when it does not."""
        found = _decoded(await self._ask("GET", "/models", None), _Models)
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
        return _decoded(await self._ask("POST", TOKENIZE, body, request.model, CANNOT_COUNT), _TokenCount).count

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """As `Inference.embed`, tried once. What it takes is to be of a fit size: see `request_to_parts`."""
        body, lacking = request_to_embedding_body(request), "makes no embeddings"
        answer = await self._ask("POST", "/embeddings", body, request.model, lacking)
        return await asyncio.to_thread(answer_to_embeddings, answer, request)

    async def _ask(self, method: str, path: str, body: bytes | None, model: str = "", lacking: str = "") -> bytes:
        """A question with a short answer of JSON. `lacking` says of a server that does not know the path what it
        cannot do."""
        answer = await self._send(method, path, body)
        try:
            if lacking and answer.status in (404, 405, 501):
                error = await self._error(answer, model)
                if not isinstance(error, ModelNotFound):
                    error = Unsupported(f"This model's server {lacking}.", param="model")
                raise error
            if answer.status != 200:
                raise await self._error(answer, model)
            return await self._read_body(answer, MAX_BODY_BYTES)
        finally:
            self._http.release(answer)

    async def _send(self, method: str, path: str, body: bytes | None) -> Answer:
        """Send; wait for the headers. Releasing the answer closes its connection, or keeps it where all was read."""
        limits = self._timeouts
        headers = self._headers + headers_to_bytes(TRACE.get())
        url = f"{self.base_url.removesuffix('/v1') if path == TOKENIZE else self.base_url}{path}"
        try:
            async with asyncio.timeout(limits.headers_s):
                return await self._http.send(method, url, headers, body, limits.connect_s)
        except ConnectTimedOut as exc:
            what = f"connect_timeout_s ({limits.connect_s:g} s)"
            raise ConnectTimeout(f"The inference server could not be reached within {what}.") from exc
        except TimeoutError as exc:
            raise self._too_slow() from exc
        except HttpFailed as exc:
            raise Unavailable("The inference server could not be reached.") from exc

    def _no_token(self, *, started: bool) -> UpstreamTimeout:
        limits = self._timeouts
        name, limit_s = ("token_gap", limits.token_gap_s) if started else ("first_token", limits.first_token_s)
        return UpstreamTimeout(f"The inference server sent no token within {name}_timeout_s ({limit_s:g} s).")

    def _too_slow(self) -> UpstreamTimeout:
        what = f"headers_timeout_s ({self._timeouts.headers_s:g} s)"
        return UpstreamTimeout(f"The inference server did not answer within {what}.")

    async def _check_stream(self, answer: Answer, model: str) -> None:
        if answer.status != 200:
            raise await self._error(answer, model)
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise UpstreamError("The inference server did not answer with an event stream.")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise UpstreamError("The inference server sent a compressed stream, which was not asked for.")

    async def _error(self, answer: Answer, model: str) -> StackError:
        self._context_tokens.clear()
        body = await self._read_body(answer, MAX_ERROR_BYTES)
        if self._key:
            body = body.replace(self._key.encode(), b"[key]")
        return response_to_error(answer.status, body, answer.headers, model)

    async def _read_body(self, answer: Answer, limit: int) -> bytes:
        """The body up to `limit` bytes; the rest of a longer one is left unread."""
        until = asyncio.get_running_loop().time() + self._timeouts.headers_s
        try:
            return await answer.body(limit, until)
        except TimeoutError as exc:
            raise self._too_slow() from exc
        except HttpFailed as exc:
            raise Unavailable("The connection to the inference server broke.") from exc


def _decoded(answer: bytes, kind: type[_Told]) -> _Told:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent an answer that is not valid.") from exc


async def _drain(answer: Answer) -> None:
    """Take the end of the body that comes right behind the answer's, so that the connection can serve again."""
    now = asyncio.get_running_loop().time
    until = now() + DRAIN_TIMEOUT_S
    with suppress(TimeoutError, HttpFailed):
        while not answer.over and now() < until:
            if not answer.ready:
                await answer.more(until)
            answer.take()


def _retryable(failure: StackError) -> StackError:
    """A stream that broke off before it said anything may be asked for again."""
    return Unavailable(failure.message) if type(failure) is UpstreamError else failure
