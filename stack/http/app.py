"""The HTTP API: routes over the live providers of one stack."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, get_args

import orjson
from fastapi import FastAPI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as ResponseObject
from openai.types.responses import ResponseStreamEvent
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from apis.errors import InvalidRequest, ModelNotFound, NotFound
from apis.inference import Model
from apis.responses import CompactConversation, CreateResponse, InputItemListParams
from apis.storage.keys import is_safe_id
from stack import __version__
from stack.build import Stack, open_stack
from stack.config import StackConfig
from stack.http.cache_salts import CacheSalts
from stack.http.edge import METRICS_PATH, OPEN_PATHS, Edge, client_disconnected_response, json_response
from stack.http.idempotency import Idempotency
from stack.http.metrics import CONTENT_TYPE, Metrics
from stack.http.parsing import read_request, to_invalid_request
from stack.http.request_record import RequestRecord
from stack.http.routes.chat import create_chat_completion
from stack.http.routes.containers import CONTAINER_ROUTES
from stack.http.routes.conversations import CONVERSATION_ROUTES
from stack.http.routes.embeddings import create_embeddings
from stack.http.routes.files import FILE_ROUTES
from stack.http.routes.vector_stores import VECTOR_STORE_ROUTES
from stack.http.sse import ApiDialect, encode_frames, read_dialect, response_to_json
from stack.http.streams import ClientDisconnected, EventStream, StreamMonitor, run_while_connected
from stack.http.uploads import read_body
from stack.http.websocket import WebSocketEndpoint


def create_app(config: StackConfig) -> FastAPI:
    """The app of one run config. Its lifespan opens the stack and closes it."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_stack(config) as stack:
            pulse = StreamMonitor(config.server.keep_alive_s)
            beating = asyncio.create_task(pulse.run())
            app.state.routes = Routes(stack, pulse, metrics)
            app.state.drain = stack.responses.drain
            build_sdk_schemas()
            try:
                yield
            finally:
                app.state.routes = None
                beating.cancel()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.draining = False
    app.state.routes = None
    app.add_route("/healthz", _healthz)
    app.add_route("/readyz", _readyz)
    app.add_route("/version", _version)
    fixed = {path: path for path in (*OPEN_PATHS, "/version")}
    if config.server.metrics != "closed":
        app.add_route(METRICS_PATH, _build_endpoint(Routes.metrics, METRICS_PATH), methods=["GET"])
        fixed[METRICS_PATH] = METRICS_PATH
    over_stack = (*CONTAINER_ROUTES, *CONVERSATION_ROUTES, *FILE_ROUTES, *VECTOR_STORE_ROUTES)
    for path, method, handle in (
        *_build_method_routes(),
        *((path, method, _adapt_stack_handler(on)) for path, method, on in over_stack),
    ):
        for prefix in ("/v1", ""):
            app.add_route(prefix + path, _build_endpoint(handle, f"/v1{path}"), methods=[method])
            if "{" not in path:
                fixed[prefix + path] = f"/v1{path}"
    app.router.routes.append(WebSocketRoute("/{path:path}", WebSocketEndpoint()))
    # these are the only layers around the routes: FastAPI's own ones cost more than all else a request does here
    app.middleware_stack = Edge(Idempotency(app.router), config.server, metrics, fixed)
    return app


ROUTES: Final = (
    ("/responses", "POST", "create"),
    ("/responses/input_tokens", "POST", "input_tokens"),
    ("/responses/compact", "POST", "compact"),
    ("/responses/{response_id}", "GET", "get"),
    ("/responses/{response_id}", "DELETE", "delete"),
    ("/responses/{response_id}/cancel", "POST", "cancel"),
    ("/responses/{response_id}/input_items", "GET", "input_items"),
    ("/chat/completions", "POST", "chat"),
    ("/embeddings", "POST", "embeddings"),
    ("/models", "GET", "models"),
    ("/models/{model_id:path}", "GET", "model"),
)


class _Endpoint:
    """An ASGI app that answers one kind of request. Starlette puts three more layers around a plain function, and every
    token of a stream would pass through them."""

    def __init__(self, handler: "_Handler", route: str) -> None:
        self._handler = handler
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["request_record"].route = self._route
        routes: Routes = scope["app"].state.routes
        response = await self._handler(routes, Request(scope, receive, send))
        await response(scope, receive, send)


_Handler = Callable[["Routes", Request], Awaitable[Response]]


def _build_endpoint(handler: "_Handler", route: str) -> Any:
    # Starlette takes an ASGI app too, which its types do not say
    return _Endpoint(handler, route)


def _build_method_routes() -> "list[tuple[str, str, _Handler]]":
    return [(path, method, getattr(Routes, name)) for path, method, name in ROUTES]


def _adapt_stack_handler(handler: Callable[[Request, Stack], Awaitable[Response]]) -> "_Handler":
    return lambda routes, request: handler(request, routes.stack)


class Routes:
    """One method per route. Each returns an ASGI answer, or raises a StackError for the edge to render."""

    def __init__(self, stack: Stack, monitor: StreamMonitor, metrics: Metrics) -> None:
        self.stack = stack
        self._metrics = metrics
        self.cache_salts = CacheSalts(stack.config.server)
        self._monitor = monitor
        self._max_body_bytes = stack.config.server.max_body_bytes

    async def create(self, http: Request) -> Response:
        body = await self._read_body(http)
        request = await read_request(body, CreateResponse)
        if request.input is None and b'"messages"' in body:
            raise InvalidRequest(
                "Unsupported parameter: 'messages'. In the Responses API it is 'input', 'max_tokens' is "
                "'max_output_tokens', and 'functions' are 'tools'.",
                param="messages",
                code="unsupported_parameter",
            )
        tenant: str = http.scope["tenant"]
        visit: RequestRecord = http.scope["request_record"]
        visit.expect_response()
        batches = self.stack.responses.create(
            self.cache_salts.add_salt(request, tenant), tenant=tenant, response_id=http.scope.get("response_id")
        )
        if request.stream:
            obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
            return self._stream_response(http, batches, visit, obfuscate=obfuscate)
        try:
            response = await run_while_connected(http.receive, _read_final_response(batches, visit))
        except ClientDisconnected:
            return client_disconnected_response()
        return json_response(response_to_json(response))

    async def input_tokens(self, http: Request) -> Response:
        request = await read_request(await self._read_body(http), CreateResponse)
        count = await self.stack.responses.count_input_tokens(request, tenant=http.scope["tenant"])
        return _json_value_response({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, http: Request) -> Response:
        request = await read_request(await self._read_body(http), CompactConversation)
        tenant: str = http.scope["tenant"]
        work = self.stack.responses.compact(self.cache_salts.add_salt(request, tenant), tenant=tenant)
        try:
            compacted = await run_while_connected(http.receive, work)
        except ClientDisconnected:
            return client_disconnected_response()
        return _json_value_response(compacted.model_dump(mode="json", exclude_none=True))

    async def get(self, http: Request) -> Response:
        if http.query_params.get("stream") == "true":
            after = _parse_integer(http, "starting_after", -1)
            batches = self.stack.responses.follow(_parse_response_id(http), after, tenant=http.scope["tenant"])
            return self._stream_response(
                http, batches, obfuscate=http.query_params.get("include_obfuscation") == "true"
            )
        response = await self.stack.responses.get(_parse_response_id(http), tenant=http.scope["tenant"])
        return json_response(response_to_json(response))

    async def delete(self, http: Request) -> Response:
        response_id = _parse_response_id(http)
        await self.stack.responses.delete(response_id, tenant=http.scope["tenant"])
        return _json_value_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: Request) -> Response:
        response = await self.stack.responses.cancel(_parse_response_id(http), tenant=http.scope["tenant"])
        return json_response(response_to_json(response))

    async def input_items(self, http: Request) -> Response:
        query: dict[str, Any] = {key: http.query_params[key] for key in ("after", "order") if key in http.query_params}
        limit = http.query_params.get("limit")
        if limit is not None:
            query["limit"] = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else limit
        try:
            page = InputItemListParams.model_validate(query)
        except ValidationError as exc:
            raise to_invalid_request(exc.errors(include_url=False)[0], query) from None
        items = await self.stack.responses.list_input_items(_parse_response_id(http), page, tenant=http.scope["tenant"])
        return _json_value_response(items.model_dump())

    async def chat(self, http: Request) -> Response:
        salted = partial(self.cache_salts.add_salt, tenant=http.scope["tenant"])
        return await create_chat_completion(await self._read_body(http), self.stack, salted, self._monitor, http)

    async def embeddings(self, http: Request) -> Response:
        return await create_embeddings(await self._read_body(http), self.stack.inference, http.receive)

    async def models(self, http: Request) -> Response:
        models = await self.stack.inference.models()
        return _json_value_response({"object": "list", "data": [_model_to_fields(each) for each in models]})

    async def model(self, http: Request) -> Response:
        model_id = http.path_params["model_id"]
        for each in await self.stack.inference.models():
            if each.id == model_id:
                return _json_value_response(_model_to_fields(each))
        raise ModelNotFound(model_id)

    async def metrics(self, _: Request) -> Response:
        text = await self._metrics.render_text(
            self.stack.inference, self.stack.providers_by_path, self._monitor.open_streams
        )
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _stream_response(
        self,
        http: Request,
        batches: AsyncGenerator[Sequence[Any]],
        request_record: RequestRecord | None = None,
        *,
        obfuscate: bool,
    ) -> Response:
        dialect = read_dialect(http.headers, self.stack.config.server.dialect)
        return EventStream(
            batches, lambda events: encode_frames(events, dialect, obfuscate=obfuscate), self._monitor, request_record
        )

    async def _read_body(self, http: Request) -> bytes:
        return await read_body(http, self._max_body_bytes)


async def _read_final_response(batches: AsyncGenerator[Any], request_record: RequestRecord) -> ResponseObject:
    """Drain a stream; its last event carries the whole response. A failed one raises its cause."""
    last: Any = None
    try:
        async with aclosing(batches):
            async for events in batches:
                last = events[-1]
    finally:
        request_record.observe(last)
    return last.response


def _parse_response_id(http: Request) -> str:
    response_id: str = http.path_params["response_id"]
    if not is_safe_id(response_id) or "/" in response_id:
        raise NotFound("No response has such an id.")
    return response_id


def _parse_integer(http: Request, name: str, default: int) -> int:
    """A query parameter that is a whole number from 0 on."""
    text = http.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"'{name}' is a whole number from 0 on.", param=name, code="invalid_value")
    return int(text)


def _json_value_response(value: Any, status: int = 200) -> Response:
    return json_response(orjson.dumps(value), status)


def _model_to_fields(model: Model) -> dict[str, Any]:
    fields = {"id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by}
    return {**fields, "max_model_len": model.context_tokens} if model.context_tokens else fields


def build_sdk_schemas() -> None:
    """Build the schemas of the SDK's models, which it puts off: else the first requests would wait for them.

    The response comes first, because what holds one is then built with the schema that is there.
    """
    for kind in (ResponseObject, *get_args(get_args(ResponseStreamEvent)[0]), ChatCompletion, ChatCompletionChunk):
        kind.model_rebuild()


async def _version(_: Request) -> Response:
    return _json_value_response(
        {"name": "responses-stack", "version": __version__, "dialects": [*get_args(ApiDialect)]}
    )


async def _healthz(_: Request) -> Response:
    return _json_value_response({"status": "ok"})


async def _readyz(http: Request) -> Response:
    state = http.app.state
    if state.draining or state.routes is None:
        return _json_value_response({"status": "draining" if state.draining else "starting"}, 503)
    return _json_value_response({"status": "ready"})
