"""Handlers that only call one method of an API: with the ids in the path, the query or the body, and the tenant."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from apis.storage.pages import Page
from stack.http.answers import deleted_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import Handler
from stack.http.route_table import get_match

ApiT = TypeVar("ApiT")


class ApiCalls(Generic[ApiT]):
    """Builds handlers that call the API that `find` returns, which raises Unsupported where the server lacks it. They
    answer with what the method returns, or with what `show` makes of that, or of each entry of a page. Methods of an
    API that is not `of_tenants` are not given the tenant."""

    def __init__(
        self, find: Callable[[Services], ApiT], show: Callable[[Any], Any] | None = None, *, of_tenants: bool = True
    ) -> None:
        self._find = find
        self._show = show
        self._of_tenants = of_tenants

    def calling(self, name: str, method: Callable[[ApiT], Callable[..., Awaitable[Any]]], status: int = 200) -> Handler:
        """Return the handler `name`. The models of the query and of the body are those of the row."""

        async def handle(http: Request, context: HttpContext, services: Services) -> Response:
            route, arguments = get_match(http.scope).route, list[Any](http.path_params.values())
            if route is not None and route.query is not None:
                arguments.append(read_query(http, route.query))
            if route is not None and route.body is not None:
                arguments.append(await read_model(http, route.body))
            result = await method(self._find(services))(*arguments, **self._name_tenant(context))
            if self._show is not None:
                result = cast("Page[Any]", result).map(self._show) if isinstance(result, Page) else self._show(result)
            return value_response(result, status)

        handle.__name__ = name
        return handle

    def deleting(self, name: str, method: Callable[[ApiT], Callable[..., Awaitable[None]]], kind: str) -> Handler:
        """Return the handler `name`, which confirms that the method has deleted the object with the last id in the
        path; `kind` is the `object` field of its answer."""

        async def handle(http: Request, context: HttpContext, services: Services) -> Response:
            ids = [*http.path_params.values()]
            await method(self._find(services))(*ids, **self._name_tenant(context))
            return deleted_response(ids[-1], kind)

        handle.__name__ = name
        return handle

    def _name_tenant(self, context: HttpContext) -> dict[str, str]:
        return {"tenant": context.tenant} if self._of_tenants else {}
