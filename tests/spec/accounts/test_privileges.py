"""Every route of the app is a row of the privilege matrix in `test_stored_keys`, and none is open without a key."""

import re
from typing import Any

import pytest
from starlette.routing import Route as StarletteRoute
from starlette.routing import WebSocketRoute

from apis.accounts.directory import KeyOptions
from stack.http.access.privileges import RESOURCE_SCOPES, SERVER_RESOURCES
from stack.http.edge import OPEN_PATHS
from stack.http.routes.absences import ABSENT_RESOURCES
from tests.spec.accounts.test_stored_keys import ROUTES, SCOPES, STORED, directory_of, new_key
from tests.stack.http.raw import ask, check_error
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving


def served_routes(served: Served) -> set[tuple[str, str]]:
    """The method and path of every route of the app, whichever table it comes from."""
    return {
        (method, route.path)
        for route in served.app.router.routes
        if isinstance(route, StarletteRoute)
        for method in route.methods or ()
        if method != "HEAD"
    }


async def test_every_route_of_the_app_is_in_the_matrix_and_closed_without_a_key() -> None:
    async with serving(more=STORED) as served:
        routes = served_routes(served)
        in_matrix = {(route.method, f"{prefix}{route.path}") for route in ROUTES for prefix in ("/v1", "")}
        own = {path for _, path in routes - in_matrix}
        assert own == OPEN_PATHS | {f"/{resource}" for resource in SERVER_RESOURCES}
        assert [type(route) for route in served.app.router.routes if not isinstance(route, StarletteRoute)] == [
            WebSocketRoute
        ]
        resources = {route.path.split("/")[1] for route in ROUTES}
        assert resources <= set(RESOURCE_SCOPES)
        rows = resources | {route.path[1:] for route in ROUTES}
        assert set(RESOURCE_SCOPES) - ABSENT_RESOURCES.keys() <= rows, "a row of RESOURCE_SCOPES that no route has"
        for method, path in sorted(routes):
            if path not in OPEN_PATHS and not path.startswith("/v1"):
                answer = await ask(served.url, b"", method=method, path=re.sub(r"[{}]|:path", "", path))
                assert check_error(answer, 401)["code"] == "invalid_api_key", (method, path)


async def test_the_websocket_opens_for_the_scope_of_responses_alone() -> None:
    async with serving(more=STORED) as served:
        keys = {scope: await new_key(served, "alpha", scope) for scope in SCOPES if scope != "admin"}
        keys["admin"] = await directory_of(served).create_key(None, KeyOptions("root"))
        for scope, key in keys.items():
            async with sdk_client(served.url, key.value) as client:
                if scope == "responses":
                    async with talking(served, client) as talk:
                        await talk.ask()
                    continue
                connection: Any = client.responses.connect()
                with pytest.raises(Exception, match="403"):
                    await connection.enter()
