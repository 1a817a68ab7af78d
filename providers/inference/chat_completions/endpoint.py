"""Client of one OpenAI-compatible server: sends requests, returns batches of deltas or vectors."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import msgspec
from pydantic import SecretStr

from apis.chat import ChatRequest
from apis.completion import CompletionDelta, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, TextDelta, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import CountingUnsupported, ModelNotFound, StackError, Unsupported, UpstreamError, UpstreamTimeout
from apis.inference import CALL_ATTEMPTS, Modality, Model
from apis.sink import ConvertedSink, Sink
from apis.telemetry import NO_SPAN, TRACE_HEADERS, AttributeValue, current_span
from apis.transcription import Transcript, TranscriptionRequest
from providers.common.fair_turns import end_pass
from providers.common.net.http.client import HttpClient, HttpConnectError, HttpConnectTimeout, headers_to_bytes
from providers.common.net.http.connection import HttpConnection, HttpError
from providers.common.net.http.route import ProxyError, parse_url
from providers.inference.chat_completions.affinity import affinity_headers
from providers.inference.chat_completions.answer_stream import AnswerStream, EndpointLimits, token_timeout_error
from providers.inference.chat_completions.body import ChatDialect, request_to_body, request_to_tokenize_body
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.chunks import ChatChunkReader
from providers.inference.chat_completions.embeddings import parse_embeddings, request_to_embedding_body
from providers.inference.chat_completions.errors import ConnectTimeout, UpstreamUnavailable, response_to_error
from providers.inference.chat_completions.first_token import (
    FirstToken,
    parse_chat_answer,
    parse_text_answer,
    parse_tokens,
    scored_ids_to_fields,
    texts_to_tokenize_body,
    token_ids_to_body,
)
from providers.inference.chat_completions.refusals import ArrangedChat, ChatForms
from providers.inference.chat_completions.system_one import NO_DECISIONS, parse_system_one
from providers.inference.chat_completions.text_completions import NO_COMPLETIONS, CompletionReader, write_completion
from providers.inference.chat_completions.transcriptions import (
    NO_TRANSCRIPTIONS,
    TRANSCRIPTIONS_PATH,
    TranscriptReader,
    parse_transcript,
    write_form,
)
from providers.inference.chat_completions.usage import parse_count

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024
DRAIN_TIMEOUT_S: Final = 0.1
LISTING_TIMEOUT_S: Final = 2.0
"""Seconds that a chat waits for the list of models, which it needs for an unknown model only."""
LISTING_MAX_AGE_S: Final = 3.0
DEFAULT_TAG: Final = ":latest"
"""The tag that Ollama adds to the name of a model without one."""
NO_HEADERS: Final[Mapping[str, str]] = {}
COUNTING_UNSUPPORTED: Final = "cannot count tokens"
_CONTENT_TYPE: Final = "Content-Type"
TOKENIZE_PATH: Final = "/tokenize"
"""Path of vLLM's tokenizer, which is not under `/v1`."""


class PromptTemplate(Protocol):
    """How a chat becomes a request to a server, and how the response is read; defines who renders the prompt."""

    async def build_request(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, ChunkReader]:
        """Return the path below `base_url`, the body to POST and the reader of the response.

        `context_tokens` returns the model's context length as listed by the server. Raises InvalidRequest for a chat
        that cannot be rendered.
        """
        ...


RequestBuilder = Callable[[], Awaitable[tuple[str, bytes, ChunkReader]]]
"""Builds a request as `PromptTemplate.build_request` does."""


class _Model(msgspec.Struct):
    id: str
    owned_by: Any = None
    created: Any = None
    max_model_len: Any = None
    context_length: Any = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: Any


_Response = TypeVar("_Response", _ModelList, _TokenCount)


class ChatCompletions:
    """Client of one server at `base_url`, the URL below which `/chat/completions` and `/models` lie (usually `/v1`).
    Without a `template` the server renders the prompt.

    `http` belongs to the caller; `forms` are those that earlier clients of the server have learned. The API key is sent
    to `base_url` only; redirects are not followed.
    """

    def __init__(
        self,
        base_url: str,
        http: HttpClient,
        *,
        api_key: SecretStr | None = None,
        dialect: ChatDialect | None = None,
        template: PromptTemplate | None = None,
        limits: EndpointLimits | None = None,
        forms: ChatForms | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = http
        origin = parse_url(base_url)[0]
        proxy = http.find_proxy(origin)
        self._server = "inference server" if proxy is None else f"inference server through the proxy {proxy.name}"
        self._dialect = dialect or ChatDialect()
        self._is_openai = self._dialect.engine == "openai"
        self._server_attributes: dict[str, AttributeValue] = {"server.address": origin.host, "server.port": origin.port}
        tier = self._dialect.extra_body.get("service_tier")
        if self._is_openai and isinstance(tier, str) and tier != "auto":
            self._server_attributes["openai.request.service_tier"] = tier
        self._template = template
        self._forms = ChatForms() if forms is None else forms
        self._context_tokens: dict[str, int | None] = {}
        self._listed_models: frozenset[str] = frozenset()
        self._listing_tried_at = -math.inf
        self._listing_lock = asyncio.Lock()
        self._limits = limits or EndpointLimits()
        self._api_key = api_key.get_secret_value() if api_key is not None else ""
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        self._headers = headers_to_bytes({**headers, "Content-Type": "application/json"})
        self._form_headers = headers_to_bytes(headers)

    def stream(self, request: ChatRequest, sink: Sink[Delta]) -> Awaitable[None]:
        """See `Inference.stream`; one attempt, or one more for each form of the chat that the server refuses. Before
        the first batch, UpstreamUnavailable, ConnectTimeout and RateLimited mean that a retry is safe."""
        chat, names = ArrangedChat(request, self._dialect, self._forms), self._dialect.affinity_headers
        return self._generate(
            request.model,
            lambda: self._build_request(chat),
            sink,
            headers=affinity_headers(names, request) if names else NO_HEADERS,
            chat=chat,
        )

    async def _build_request(self, chat: ArrangedChat) -> tuple[str, bytes, ChunkReader]:
        request = chat.request
        if self._template is not None:
            return await self._template.build_request(request, lambda: self._find_context_tokens(request.model))
        await end_pass(request.messages)
        body = request_to_body(request, chat.dialect)
        await end_pass(request.messages)
        return "/chat/completions", body, ChatChunkReader(chat.original)

    async def complete(
        self,
        request: CompletionRequest,
        sink: Sink[CompletionDelta | Usage],
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the batches of `Inference.complete` into `sink`; one attempt, and errors as in `stream`. `extra_body` is
        merged over the body."""
        reader = CompletionReader(request)

        async def build_request() -> tuple[str, bytes, ChunkReader]:
            return *write_completion(request, self._dialect.engine, extra_body), reader

        pieces = ConvertedSink[Delta, CompletionDelta | Usage](sink, lambda _: reader.take_batch())
        await self._generate(request.model, build_request, pieces, NO_COMPLETIONS)

    async def _generate(
        self,
        model: str,
        build_request: RequestBuilder,
        sink: Sink[Delta],
        unsupported_feature: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
        chat: ArrangedChat | None = None,
    ) -> None:
        """Put the deltas of one streamed answer into `sink`. `unsupported_feature` as in `_request_json`. A refusal to
        which `chat` adapts is followed by another request."""
        span = current_span()
        span.set(self._server_attributes)
        if (attempts := CALL_ATTEMPTS.get()) is not None:
            attempts.is_sent = True
        await self._check_model(model)
        while True:
            path, request_body, reader = await build_request()
            deadline = monotonic() + self._limits.first_token_s
            body = [request_body]
            del request_body
            # Popped, so that the bytes of a long prompt are freed once sent instead of held for the whole response.
            connection = await self._send("POST", path, body.pop(), deadline, headers)
            answer = AnswerStream(connection, reader, self._limits, self._server, sink)
            try:
                reader.keeps_head = span is not NO_SPAN
                await self._check_response(connection, model, unsupported_feature)
                await answer.read(deadline)
                if not (reader.was_cut or connection.is_complete):
                    await _drain_body(connection)
                return
            except StackError as exc:
                if answer.has_output or chat is None or not chat.adapt(exc):
                    raise
            finally:
                if answer.has_output and chat is not None:
                    chat.remember()
                self._http.release(connection)
                if span is not NO_SPAN:
                    span.set(reader.describe(is_openai=self._is_openai))

    async def models(self, modalities: frozenset[Modality] | None = None) -> Sequence[Model]:
        """Return the models that the server lists. Raises UpstreamError when it does not respond."""
        listing = _decode_response(await self._request_json("GET", "/models", None), _ModelList)
        self._listed_models = frozenset(model.id for model in listing.data)
        return [
            Model(
                id=model.id,
                owned_by=model.owned_by if model.owned_by and isinstance(model.owned_by, str) else "upstream",
                created=parse_count(model.created),
                context_tokens=parse_count(model.max_model_len) or parse_count(model.context_length) or None,
                modalities=modalities,
            )
            for model in listing.data
        ]

    async def _check_model(self, model: str) -> None:
        """Raise ModelNotFound for a model that the server does not list, where its list is complete. A list that cannot
        be read forbids nothing; a new one is read for an unknown model, but not all the time."""
        if not self._dialect.lists_all_models or self._is_listed(model):
            return
        async with self._listing_lock:
            now = monotonic()
            if now - self._listing_tried_at > LISTING_MAX_AGE_S and not self._is_listed(model):
                self._listing_tried_at = now
                with suppress(StackError, TimeoutError):
                    async with asyncio.timeout(LISTING_TIMEOUT_S):
                        await self.models()
        if self._listed_models and not self._is_listed(model):
            raise ModelNotFound(model, self._listed_models)

    def _is_listed(self, model: str) -> bool:
        return model in self._listed_models or f"{model}{DEFAULT_TAG}" in self._listed_models

    async def _find_context_tokens(self, model: str) -> int | None:
        """Return the model's context length as the server lists it; cached until a request fails."""
        if model not in self._context_tokens:
            self._context_tokens |= {listed.id: listed.context_tokens for listed in await self.models()}
        return self._context_tokens.get(model)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the prompt by vLLM's /tokenize. Raises CountingUnsupported where the server has
        none."""
        if self._dialect.engine != "vllm":
            raise CountingUnsupported(f"This model's server {COUNTING_UNSUPPORTED}.", param="model")

        async def send(arranged: ChatRequest, dialect: ChatDialect) -> bytes:
            body = request_to_tokenize_body(arranged, dialect)
            return await self._request_json("POST", TOKENIZE_PATH, body, request.model, COUNTING_UNSUPPORTED)

        response = await ArrangedChat(request, self._dialect, self._forms).submit(send)
        return parse_count(_decode_response(response, _TokenCount).count)

    async def find_token_ids(self, model: str, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of the tokens that have these texts, by vLLM's /tokenize: of those texts that are one token,
        none with a line break. Raises CountingUnsupported where the server has none, and the errors of `embed`."""
        body = texts_to_tokenize_body(model, texts)
        return parse_tokens(await self._request_json("POST", TOKENIZE_PATH, body, model, COUNTING_UNSUPPORTED))

    async def score_chat(self, request: ChatRequest, scored_ids: Sequence[int] = ()) -> FirstToken:
        """Return the likeliest first tokens of the answer to a chat that asks for them, or those with `scored_ids` from
        a server that scores chosen tokens. Errors as in `embed`, and Unsupported from a server that reports none."""
        current_span().set(self._server_attributes)
        await self._check_model(request.model)
        headers = affinity_headers(self._dialect.affinity_headers, request)
        fields = {**scored_ids_to_fields(scored_ids), **self._dialect.extra_body}

        async def send(arranged: ChatRequest, dialect: ChatDialect) -> bytes:
            body = request_to_body(arranged, dialect, is_streamed=False)
            return await self._request_json("POST", "/chat/completions", body, request.model, headers=headers)

        chat = ArrangedChat(request, replace(self._dialect, extra_body=fields), self._forms)
        return parse_chat_answer(await chat.submit(send))

    async def score_tokens(
        self, model: str, token_ids: Sequence[int], cache_salt: str | None, scored_ids: Sequence[int] = ()
    ) -> FirstToken:
        """Return the likeliest first tokens after a prompt of tokens, or those with `scored_ids`. Errors as in
        `score_chat`."""
        current_span().set(self._server_attributes)
        await self._check_model(model)
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        fields = {**salt, **scored_ids_to_fields(scored_ids), **self._dialect.extra_body}
        body = token_ids_to_body(model, token_ids, fields)
        return parse_text_answer(await self._request_json("POST", "/completions", body, model, NO_COMPLETIONS))

    async def decide(self, request: DecisionRequest, body: bytes) -> Decisions:
        """Return the decisions of a decision model: `body` is that of the request. Raises Unsupported from a server
        without them."""
        current_span().set(self._server_attributes)
        await self._check_model(request.model)
        response = await self._request_json("POST", "/systemone", body, request.model, NO_DECISIONS)
        return parse_system_one(response, request)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """See `Inference.embed`; one attempt. A large request must be split by the caller: see `split_request`."""
        current_span().set(self._server_attributes)
        await self._check_model(request.model)
        body, unsupported = request_to_embedding_body(request), "makes no embeddings"
        response_body = await self._request_json("POST", "/embeddings", body, request.model, unsupported)
        return await asyncio.to_thread(parse_embeddings, response_body, request)

    async def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Transcript:
        """See `Inference.transcribe`; one attempt, and errors as in `stream`."""
        if not request.stream:
            return await self._read_transcript(request)
        reader = TranscriptReader(request)
        form, content_type = write_form(request)

        async def build_request() -> tuple[str, bytes, ChunkReader]:
            return TRANSCRIPTIONS_PATH, form, reader

        texts = ConvertedSink[Delta, str](
            sink, lambda batch: [each.text for each in batch if isinstance(each, TextDelta)]
        )
        headers = {_CONTENT_TYPE: content_type}
        await self._generate(request.model, build_request, texts, NO_TRANSCRIPTIONS, headers)
        return reader.read_transcript()

    async def _read_transcript(self, request: TranscriptionRequest) -> Transcript:
        current_span().set(self._server_attributes)
        await self._check_model(request.model)
        form, content_type = await asyncio.to_thread(write_form, request)
        headers = {_CONTENT_TYPE: content_type}
        answer = await self._request_json(
            "POST", TRANSCRIPTIONS_PATH, form, request.model, NO_TRANSCRIPTIONS, headers=headers
        )
        return parse_transcript(answer, request)

    async def _request_json(
        self,
        method: str,
        path: str,
        body: bytes | None,
        model: str = "",
        unsupported_feature: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> bytes:
        """Send a request and return its short JSON response. `unsupported_feature` describes what a server without this
        path cannot do."""
        connection = await self._send(method, path, body, headers=headers)
        try:
            await self._check_support(connection, model, unsupported_feature)
            if not _is_success(connection.status):
                raise await self._read_error(connection, model)
            _check_encoding(connection)
            return await self._read_body(connection, MAX_BODY_BYTES)
        finally:
            self._http.release(connection)

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        first_token_deadline: float = math.inf,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> HttpConnection:
        """Send a request and wait for the headers; the caller must release the connection."""
        limits = self._limits
        own_headers = {**TRACE_HEADERS.get(), **headers}
        head = self._form_headers if _CONTENT_TYPE in headers else self._headers
        head = head + headers_to_bytes(own_headers) if own_headers else head
        url = f"{self.base_url.removesuffix('/v1') if path == TOKENIZE_PATH else self.base_url}{path}"
        headers_deadline = monotonic() + limits.headers_s
        try:
            deadline = min(headers_deadline, first_token_deadline)
            return await self._http.send(method, url, head, body, limits.connect_s, deadline)
        except HttpConnectTimeout as exc:
            limit = f"connect_timeout_s ({limits.connect_s:g} s)"
            raise ConnectTimeout(f"The {self._server} could not be reached within {limit}.") from exc
        except TimeoutError as exc:
            if first_token_deadline <= headers_deadline:  # not by the clock: a timer may end a little early
                raise token_timeout_error(self._limits, has_started=False) from exc
            raise self._response_timeout_error() from exc
        except ProxyError as exc:
            error = UpstreamUnavailable if exc.is_temporary else UpstreamError
            raise error(f"The inference server could not be reached: {exc}.") from exc
        except HttpConnectError as exc:
            raise UpstreamUnavailable(f"The {self._server} could not be reached.") from exc
        except HttpError as exc:
            raise UpstreamUnavailable(f"The {self._server} broke the connection, or did not answer in HTTP.") from exc

    def _response_timeout_error(self) -> UpstreamTimeout:
        limit = f"headers_timeout_s ({self._limits.headers_s:g} s)"
        return UpstreamTimeout(f"The inference server did not answer within {limit}.")

    async def _check_support(self, connection: HttpConnection, model: str, unsupported_feature: str) -> None:
        """Raise Unsupported where the server has no such path, and ModelNotFound where it means the model."""
        if unsupported_feature and connection.status in (404, 405, 501):
            error = await self._read_error(connection, model)
            if not isinstance(error, ModelNotFound):
                error_type = CountingUnsupported if unsupported_feature == COUNTING_UNSUPPORTED else Unsupported
                error = error_type(f"This model's server {unsupported_feature}.", param="model")
            raise error

    async def _check_response(self, connection: HttpConnection, model: str, unsupported_feature: str) -> None:
        """Raise the error of a head that refuses the request."""
        if not _is_success(connection.status):
            await self._check_support(connection, model, unsupported_feature)
            raise await self._read_error(connection, model, is_generation=True)
        _check_encoding(connection)
        is_stream = connection.headers.get("content-type", "").lower().startswith("text/event-stream")
        connection.headers.clear()
        if is_stream and (attempts := CALL_ATTEMPTS.get()) is not None:  # another body may be an error
            attempts.accept()

    async def _read_error(self, connection: HttpConnection, model: str, *, is_generation: bool = False) -> StackError:
        self._context_tokens.clear()
        body = await self._read_body(connection, MAX_ERROR_BYTES)
        if self._api_key:
            body = body.replace(self._api_key.encode(), b"[key]")
        return response_to_error(connection.status, body, connection.headers, model, is_generation=is_generation)

    async def _read_body(self, connection: HttpConnection, limit_bytes: int) -> bytes:
        """Return the body up to `limit_bytes`; the rest of a longer one stays unread."""
        deadline = monotonic() + self._limits.headers_s
        try:
            return await connection.read_body(limit_bytes, deadline)
        except TimeoutError as exc:
            raise self._response_timeout_error() from exc
        except HttpError as exc:
            raise UpstreamUnavailable(f"The connection to the {self._server} broke.") from exc


def _is_success(status: int) -> bool:
    """Return true for a status that an answer may have: some servers create theirs, and proxies change some."""
    return status in (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.NON_AUTHORITATIVE_INFORMATION)


def _check_encoding(connection: HttpConnection) -> None:
    """Raise UpstreamError for an answer that is compressed in a way that the connection does not undo."""
    encoding = connection.headers.get("content-encoding")
    if encoding is not None:
        name = encoding[:32].encode("ascii", "replace").decode()
        raise UpstreamError(f"The inference server sent an answer compressed as '{name}', which was not asked for.")


def _decode_response(body: bytes, response_type: type[_Response]) -> _Response:
    try:
        return msgspec.json.decode(body, type=response_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent an answer that is not valid.") from exc


async def _drain_body(connection: HttpConnection) -> None:
    """Read the end of the body that directly follows the last event, so that the connection can be reused."""
    deadline = monotonic() + DRAIN_TIMEOUT_S
    with suppress(TimeoutError, HttpError):
        while not connection.is_complete and monotonic() < deadline:
            if not connection.is_ready:
                await connection.wait_for_data(deadline)
            connection.read_available()
