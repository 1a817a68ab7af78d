"""Readers of a request: its bounded body, what its caller may do with it, and its query parameters."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cache
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from apis.accounts.charges import RELEASED_USE
from apis.errors import InvalidRequest, PayloadTooLarge
from apis.wire.field_rows import refused_fields
from providers.common.fair_turns import calculate
from stack.http.context import HttpContext, Services, get_context, get_services
from stack.http.metering import GrantedRequest, RequestT, count_request, grant_request, open_charge
from stack.http.parsing import Body, ModelT, find_header, is_large, read_request, to_invalid_request
from stack.http.streams import run_while_connected


async def stream_body(http: Request, max_bytes: int, setting: str | None) -> AsyncGenerator[bytes]:
    """Yield the chunks of the body. Raises PayloadTooLarge as soon as it is known to exceed `max_bytes`, the value of
    `setting` in the run config."""
    body = _IncomingBody(http, max_bytes, setting)
    while not body.is_whole:
        if chunk := await body.receive():
            yield chunk


async def read_body(http: Request) -> Body:
    """Return the whole body. Raises PayloadTooLarge, and Overloaded if too much is held for bodies already."""
    return await _read_body(http, get_context(http.scope), get_services(http.scope))


async def _read_body(http: Request, context: HttpContext, services: Services) -> Body:
    # not `stream_body`: a generator costs as much as the rest, and nearly every body is one chunk
    body = _IncomingBody(http, services.stack.config.server.max_body_bytes, "server.max_body_bytes")
    chunk = await body.receive()
    services.shares.cover_body(context.places, body.size_bytes, context.tenant)
    if body.is_whole:
        return chunk
    received = bytearray(chunk)  # it grows in place: chunks that are joined at the end are in memory twice
    while not body.is_whole:
        received += await body.receive()
        services.shares.cover_body(context.places, body.size_bytes, context.tenant)
    return received


class _IncomingBody:
    """The body of a request while it is received: `size_bytes` of it until now. Raises PayloadTooLarge as soon as it is
    known to exceed `max_bytes`, the value of `setting` in the run config."""

    def __init__(self, http: Request, max_bytes: int, setting: str | None) -> None:
        self._http = http
        self._max_bytes = max_bytes
        self._setting = setting
        self.size_bytes = 0
        self.is_whole = False
        length = find_header(http.scope, b"content-length") or ""
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large_error(max_bytes, setting)

    async def receive(self) -> bytes:
        """Return the next chunk, which may be empty. Raises InvalidRequest where the client has left."""
        message = await self._http.receive()
        if message["type"] != "http.request":
            raise InvalidRequest("The client left before its body was whole.")
        chunk: bytes = message.get("body", b"")
        self.is_whole = not message.get("more_body", False)
        self.size_bytes += len(chunk)
        if self.size_bytes > self._max_bytes:
            raise _too_large_error(self._max_bytes, self._setting)
        return chunk


def _too_large_error(max_bytes: int, setting: str | None) -> PayloadTooLarge:
    hint = f": the limit is `{setting}`" if setting else ""
    return PayloadTooLarge(f"The body is larger than {max_bytes} bytes{hint}.")


async def read_model(http: Request, model: type[ModelT]) -> ModelT:
    """Return the body as one of our models; no body is an empty object. Raises PayloadTooLarge, InvalidRequest, and
    PermissionDenied if the caller's key is bound to other models or tools."""
    context, services = get_context(http.scope), get_services(http.scope)
    return (await _read_granted(http, context, services, model))[0].sent


async def read_counted(
    http: Request,
    model: type[ModelT],
    *,
    complete: Callable[[ModelT], Awaitable[ModelT]] | None = None,
    embeds: bool = False,
) -> ModelT:
    """Return the body as a request for which no model generates, after it was counted under the limits of its key;
    with `embeds` also the tokens of its text. `complete` returns it with the fields that it may leave out. Raises what
    `read_metered` raises."""
    context, services = get_context(http.scope), get_services(http.scope)
    granted, size_bytes = await _read_granted(http, context, services, model, complete)
    context.charge = await count_request(services.stack.accounts, context.caller, granted, size_bytes if embeds else 0)
    return granted.sent


async def read_metered(http: Request, model: type[ModelT]) -> ModelT:
    """Return the body as a request that a model will answer, after it was counted under the limits of its key and
    admitted to the models. Raises RateLimited, Overloaded, and what `read_model` raises."""
    context, services = get_context(http.scope), get_services(http.scope)
    granted, size_bytes = await _read_granted(http, context, services, model, needs_body=True)
    await _admit_counted(http, context, services, granted, size_bytes)
    return granted.sent


async def charge_request(http: Request, request: RequestT, size_bytes: int) -> RequestT:
    """Return a request that a server other than those of models answers, after it was counted under the limits of its
    key; `size_bytes` are those of its text. Raises RateLimited, and what `read_model` raises for models and tools."""
    context, stack = get_context(http.scope), get_services(http.scope).stack
    granted = await grant_request(stack, context.caller, request)
    context.charge = await open_charge(stack.accounts, context.caller, granted, size_bytes)
    return granted.sent


async def admit_request(http: Request, request: RequestT, size_bytes: int) -> RequestT:
    """Return a request that a model will answer, after it was counted and admitted as `read_metered` does; `size_bytes`
    are those of its text. Raises what that raises."""
    context, services = get_context(http.scope), get_services(http.scope)
    granted = await grant_request(services.stack, context.caller, request)
    await _admit_counted(http, context, services, granted, size_bytes)
    return granted.sent


async def read_converted(
    http: Request,
    model: type[ModelT],
    convert: Callable[[ModelT], RequestT],
    *,
    generates: bool = True,
) -> tuple[ModelT, RequestT]:
    """Return the body, and the request that it stands for, after that was counted and admitted as `read_metered` does;
    without `generates` as `read_counted` does. Raises what those raise."""
    context, services = get_context(http.scope), get_services(http.scope)
    body = await _read_body(http, context, services)
    sent, size_bytes, in_thread = await read_request(body, model), len(body), is_large(body)
    del body  # its texts are in both requests, of which the first is soon dropped
    request = await calculate(convert, sent) if in_thread else convert(sent)
    granted = await grant_request(services.stack, context.caller, request)
    if generates:
        await _admit_counted(http, context, services, granted, size_bytes)
    else:
        context.charge = await count_request(services.stack.accounts, context.caller, granted)
    return sent, granted.sent


async def _admit_counted(
    http: Request, context: HttpContext, services: Services, granted: GrantedRequest[Any], size_bytes: int
) -> None:
    """Count a request under the limits of its key, and wait for its place among those that models answer."""
    accounts, is_batch = services.stack.accounts, context.is_batch_line
    context.charge = await open_charge(accounts, context.caller, granted, size_bytes, is_batch=is_batch)
    if is_batch or getattr(granted.sent, "background", None):
        return  # lines of batches and background responses have places of their own
    try:
        place = services.admission.try_enter(context.tenant)
        if place is None:
            place = await run_while_connected(http, services.admission.enter(context.tenant, granted.sent))
        context.places.append(place)
    except BaseException:
        if context.charge is not None:  # no model has worked
            context.charge.end(RELEASED_USE)
        raise


async def _read_granted(
    http: Request,
    context: HttpContext,
    services: Services,
    model: type[ModelT],
    complete: Callable[[ModelT], Awaitable[ModelT]] | None = None,
    *,
    needs_body: bool = False,
) -> tuple[GrantedRequest[ModelT], int]:
    """Return the body as a request, and its size. Unless it `needs_body`, no body is an empty object."""
    body = await _read_body(http, context, services)
    request, size_bytes = await read_request(body if body or needs_body else b"{}", model), len(body)
    del body  # its texts are in the request, which may wait and then lives until the end of its response
    if complete is not None:
        request = await complete(request)
    return await grant_request(services.stack, context.caller, request), size_bytes


def read_query(http: Request, model: type[ModelT]) -> ModelT:
    """Return the query's parameters as one of our models. Raises InvalidRequest."""
    query: dict[str, Any] = {key: http.query_params[key] for key in model.model_fields if key in http.query_params}
    limit = query.get("limit")
    if isinstance(limit, str) and limit.isascii() and limit.isdigit() and len(limit) < 10:
        query["limit"] = int(limit)
    for key in (*model.model_fields, *_refused_names(model.__name__)):
        if key in http.query_params:
            query.setdefault(key, http.query_params[key])
        if values := http.query_params.getlist(f"{key}[]"):
            query[key] = values
        if fields := _nested_fields(http, key):
            query[key] = fields
    if "include" in model.model_fields:
        query["include"] = http.query_params.getlist("include") + http.query_params.getlist("include[]")
    try:
        return model.model_validate(query)
    except ValidationError as exc:
        raise to_invalid_request(exc.errors(include_url=False)[0], query) from None


def _nested_fields(http: Request, name: str) -> dict[str, str]:
    """Return the fields of an object in the query, which are sent as `name[field]`."""
    prefix = f"{name}["
    keys = [key for key in http.query_params if key.startswith(prefix) and key.endswith("]")]
    return {key[len(prefix) : -1]: http.query_params[key] for key in keys if key != f"{prefix}]"}


@cache
def _refused_names(model_name: str) -> tuple[str, ...]:
    return tuple(refused_fields([model_name]))
