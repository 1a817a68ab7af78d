"""Every route of the app is a row of the privilege matrix in `test_stored_keys`, and none is open without a key."""

import re
from typing import Any

import pytest

from apis.accounts.directory import KeyOptions
from stack.http.routes.server import METRICS_ROUTE, PROBE_PATHS, SERVER_ROUTES
from tests.spec.accounts.test_stored_keys import ROUTES, SCOPES, STORED, directory_of, new_key
from tests.stack.http.raw import ask, check_error
from tests.support.sdk.client import sdk_client
from tests.support.sdk.openapi_document import described_routes
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import serving


async def test_every_route_of_the_app_is_in_the_matrix_and_closed_without_a_key() -> None:
    async with serving(more=STORED) as served:
        described = {(route.method, path) for path, route in described_routes()}
        own = {route for route in (*SERVER_ROUTES, METRICS_ROUTE) if route.access.needs_key}
        in_matrix = {(route.method, f"/v1{route.path}") for route in ROUTES}
        assert described - in_matrix == {("GET", path) for path in PROBE_PATHS | {route.path for route in own}}
        assert {route.path for route in SERVER_ROUTES if not route.access.needs_key} == {"/healthz", "/readyz"}
        for route in (*ROUTES, *own):
            assert route.access.needs_key, route.path
            answer = await ask(served.url, b"", method=route.method, path=re.sub(r"[{}]|:path", "", route.path))
            if route.path.startswith("/messages"):  # whose errors have another shape
                assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error"), route.path
            else:
                assert check_error(answer, 401)["code"] == "invalid_api_key", (route.method, route.path)


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
