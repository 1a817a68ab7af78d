"""The wire of one OpenAI-compatible server: requests out, Steps of Deltas or vectors in, over HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
from pydantic import SecretStr

from apis.chat import ChatRequest
from apis.deltas import Delta, DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ModelNotFound, StackError, Unsupported, UpstreamError, UpstreamTimeout
from apis.inference import Modality, Model
from apis.telemetry import TRACE_HEADERS
from providers.inference.chat_completions.body import ChatDialect, request_to_body, request_to_tokenize_body
from providers.inference.chat_completions.chunks import ChatChunkReader
from providers.inference.chat_completions.embeddings import parse_embeddings, request_to_embedding_body
from providers.inference.chat_completions.errors import UpstreamUnavailable, response_to_error
from providers.inference.http.client import HttpClient, HttpConnectTimeout, headers_to_bytes
from providers.inference.http.connection import HttpConnection, HttpError

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024
DRAIN_TIMEOUT_S: Final = 0.1
COUNTING_UNSUPPORTED: Final = "cannot count tokens"
TOKENIZE_PATH: Final = "/tokenize"
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


class ChunkReader(Protocol):
    """Reads an answer as ChatChunks does: see there."""

    failure: StackError | None
    is_finished: bool
    saw_activity: bool

    def feed(self, data: bytes) -> list[Delta]:
        """The deltas that `read` completed."""
        ...

    def end(self) -> list[Delta]:
        """The last deltas, when the body ended cleanly."""
        ...


class PromptTemplate(Protocol):
    """Who makes the prompt of the messages: how a chat is put to a server, and how its answer is to be read."""

    async def build_request(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, ChunkReader]:
        """The path behind `base_url`, the body to POST and what reads the answer to it.

        `context_tokens` is what the server says of the model's context. Raises InvalidRequest for what cannot be put.
        """
        ...


class ServerPromptTemplate:
    """The server makes the prompt: chat completions."""

    def __init__(self, dialect: ChatDialect) -> None:
        self._dialect = dialect

    async def build_request(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, ChunkReader]:
        """See Template."""
        return "/chat/completions", request_to_body(request, self._dialect), ChatChunkReader(request)


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    created: float | None = None
    max_model_len: int | None = None
    context_length: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: int


_Response = TypeVar("_Response", _ModelList, _TokenCount)


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
        dialect: ChatDialect | None = None,
        template: PromptTemplate | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = http
        self._dialect = dialect or ChatDialect()
        self._template = template or ServerPromptTemplate(self._dialect)
        self._context_tokens: dict[str, int | None] = {}
        self._timeouts = timeouts or Timeouts()
        self._api_key = api_key.get_secret_value() if api_key is not None else ""
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        self._headers = headers_to_bytes(headers)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """As `Inference.chat`, tried once. Before the first step, Unavailable, ConnectTimeout and RateLimited mean
        that another try is safe."""
        path, asked, chunks = await self._template.build_request(
            request, lambda: self._find_context_tokens(request.model)
        )
        body = [asked]
        del asked
        now, limits = asyncio.get_running_loop().time, self._timeouts
        deadline = now() + limits.first_token_s
        started = False
        # popped, and let go once sent: a long prompt's bytes are not to be kept for as long as the answer takes
        answer = await self._send("POST", path, body.pop())
        try:
            await self._check_response(answer, request.model)
            while not chunks.is_finished:
                try:
                    if not answer.is_ready:
                        await answer.wait_for_data(deadline)
                    read = answer.read_available()
                except TimeoutError as exc:
                    raise self._token_timeout_error(has_started=started) from exc
                except HttpError as exc:
                    error = UpstreamError if started else UpstreamUnavailable
                    raise error("The connection to the inference server broke before the answer ended.") from exc
                step = chunks.feed(read) if read else chunks.end()
                if step:
                    yield step
                if chunks.failure is not None:
                    raise chunks.failure if started or step else _to_retryable_error(chunks.failure)
                if step or chunks.saw_activity:
                    started = True
                    chunks.saw_activity = False
                    deadline = now() + limits.token_gap_s
            await _drain_body(answer)
        finally:
            self._http.release(answer)

    async def models(self, modalities: frozenset[Modality] | None = None) -> Sequence[Model]:
        """What the server lists. Raises UpstreamError when it does not."""
        found = _decode_response(await self._request_json("GET", "/models", None), _ModelList)
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

    async def _find_context_tokens(self, model: str) -> int | None:
        """The model's context as the server lists it, asked once, and again after a failure."""
        if model not in self._context_tokens:
            self._context_tokens |= {each.id: each.context_tokens for each in await self.models()}
        return self._context_tokens.get(model)

    async def count_tokens(self, request: ChatRequest) -> int:
        """The prompt's length by vLLM's /tokenize. Raises Unsupported where the server has none."""
        if self._dialect.engine != "vllm":
            raise Unsupported(f"This model's server {COUNTING_UNSUPPORTED}.", param="model")
        body = request_to_tokenize_body(request, self._dialect)
        return _decode_response(
            await self._request_json("POST", TOKENIZE_PATH, body, request.model, COUNTING_UNSUPPORTED), _TokenCount
        ).count

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """As `Inference.embed`, tried once. What it takes is to be of a fit size: see `request_to_parts`."""
        body, lacking = request_to_embedding_body(request), "makes no embeddings"
        answer = await self._request_json("POST", "/embeddings", body, request.model, lacking)
        return await asyncio.to_thread(parse_embeddings, answer, request)

    async def _request_json(
        self, method: str, path: str, body: bytes | None, model: str = "", unsupported_feature: str = ""
    ) -> bytes:
        """A question with a short answer of JSON. `lacking` says of a server that does not know the path what it
        cannot do."""
        answer = await self._send(method, path, body)
        try:
            if unsupported_feature and answer.status in (404, 405, 501):
                error = await self._read_error(answer, model)
                if not isinstance(error, ModelNotFound):
                    error = Unsupported(f"This model's server {unsupported_feature}.", param="model")
                raise error
            if answer.status != 200:
                raise await self._read_error(answer, model)
            return await self._read_body(answer, MAX_BODY_BYTES)
        finally:
            self._http.release(answer)

    async def _send(self, method: str, path: str, body: bytes | None) -> HttpConnection:
        """Send; wait for the headers. Releasing the answer closes its connection, or keeps it where all was read."""
        limits = self._timeouts
        headers = self._headers + headers_to_bytes(TRACE_HEADERS.get())
        url = f"{self.base_url.removesuffix('/v1') if path == TOKENIZE_PATH else self.base_url}{path}"
        try:
            async with asyncio.timeout(limits.headers_s):
                return await self._http.send(method, url, headers, body, limits.connect_s)
        except HttpConnectTimeout as exc:
            what = f"connect_timeout_s ({limits.connect_s:g} s)"
            raise ConnectTimeout(f"The inference server could not be reached within {what}.") from exc
        except TimeoutError as exc:
            raise self._response_timeout_error() from exc
        except HttpError as exc:
            raise UpstreamUnavailable("The inference server could not be reached.") from exc

    def _token_timeout_error(self, *, has_started: bool) -> UpstreamTimeout:
        limits = self._timeouts
        name, limit_s = ("token_gap", limits.token_gap_s) if has_started else ("first_token", limits.first_token_s)
        return UpstreamTimeout(f"The inference server sent no token within {name}_timeout_s ({limit_s:g} s).")

    def _response_timeout_error(self) -> UpstreamTimeout:
        what = f"headers_timeout_s ({self._timeouts.headers_s:g} s)"
        return UpstreamTimeout(f"The inference server did not answer within {what}.")

    async def _check_response(self, connection: HttpConnection, model: str) -> None:
        if connection.status != 200:
            raise await self._read_error(connection, model)
        kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise UpstreamError("The inference server did not answer with an event stream.")
        if connection.headers.get("content-encoding", "identity").lower() != "identity":
            raise UpstreamError("The inference server sent a compressed stream, which was not asked for.")

    async def _read_error(self, connection: HttpConnection, model: str) -> StackError:
        self._context_tokens.clear()
        body = await self._read_body(connection, MAX_ERROR_BYTES)
        if self._api_key:
            body = body.replace(self._api_key.encode(), b"[key]")
        return response_to_error(connection.status, body, connection.headers, model)

    async def _read_body(self, connection: HttpConnection, limit_bytes: int) -> bytes:
        """The body up to `limit` bytes; the rest of a longer one is left unread."""
        until = asyncio.get_running_loop().time() + self._timeouts.headers_s
        try:
            return await connection.read_body(limit_bytes, until)
        except TimeoutError as exc:
            raise self._response_timeout_error() from exc
        except HttpError as exc:
            raise UpstreamUnavailable("The connection to the inference server broke.") from exc


def _decode_response(body: bytes, response_type: type[_Response]) -> _Response:
    try:
        return msgspec.json.decode(body, type=response_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent an answer that is not valid.") from exc


async def _drain_body(connection: HttpConnection) -> None:
    """Take the end of the body that comes right behind the answer's, so that the connection can serve again."""
    now = asyncio.get_running_loop().time
    until = now() + DRAIN_TIMEOUT_S
    with suppress(TimeoutError, HttpError):
        while not connection.is_complete and now() < until:
            if not connection.is_ready:
                await connection.wait_for_data(until)
            connection.read_available()


def _to_retryable_error(failure: StackError) -> StackError:
    """A stream that broke off before it said anything may be asked for again."""
    return UpstreamUnavailable(failure.message) if type(failure) is UpstreamError else failure
