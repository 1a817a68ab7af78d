"""Handlers that only call one method of an API: with the ids in the path, the query or the body, and the tenant."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from stack.http.answers import deleted_response, model_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import Handler
from stack.http.route_table import get_match

ApiT = TypeVar("ApiT")


class ApiCalls(Generic[ApiT]):
    """Builds handlers that call the API that `find` returns, which raises Unsupported where the server lacks it.
    `render` makes the answers of what methods return."""

    def __init__(self, find: Callable[[Services], ApiT], render: Callable[[Any], Response] = model_response) -> None:
        self._find = find
        self._render = render

    def calling(
        self,
        name: str,
        method: Callable[[ApiT], Callable[..., Awaitable[Any]]],
        render: Callable[[Any], Response] | None = None,
    ) -> Handler:
        """Return the handler `name`, which renders what the method returns. The models of the query and of the body are
        those of the row."""

        async def handle(http: Request, context: HttpContext, services: Services) -> Response:
            route, arguments = get_match(http.scope).route, list[Any](http.path_params.values())
            if route is not None and route.query is not None:
                arguments.append(read_query(http, route.query))
            if route is not None and route.body is not None:
                arguments.append(await read_model(http, route.body))
            result = await method(self._find(services))(*arguments, tenant=context.tenant)
            return (render or self._render)(result)

        handle.__name__ = name
        return handle

    def deleting(self, name: str, method: Callable[[ApiT], Callable[..., Awaitable[None]]], kind: str) -> Handler:
        """Return the handler `name`, which confirms that the method has deleted the object with the last id in the
        path; `kind` is the `object` field of its answer."""

        async def handle(http: Request, context: HttpContext, services: Services) -> Response:
            ids = [*http.path_params.values()]
            await method(self._find(services))(*ids, tenant=context.tenant)
            return deleted_response(ids[-1], kind)

        handle.__name__ = name
        return handle
