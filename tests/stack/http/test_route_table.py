"""RouteTable: which route a method and a path have, and which facts of a route are said in one place alone."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.responses import Response

from apis.batches.batches import BatchEndpoint
from apis.imports import import_from_string
from stack.config import StackConfig
from stack.http.gates import CorsPolicy, Gates
from stack.http.request_record import OTHER
from stack.http.route import ADMINISTRATION, ANY_KEY, FILES, RESPONSES, Route
from stack.http.route_table import RouteTable
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES, REFUSED_ROUTES, modules_by_resource
from tests.support.servers.serving import MEMORY, SCRIPTED

ROOT = Path(__file__).parents[3]


async def answer(*_: Any) -> Response:
    return Response()


LIST = Route("GET", "/things", RESPONSES, answer)
COUNT = Route("POST", "/things/count", RESPONSES, answer, stores=False)
GET = Route("GET", "/things/{thing_id}", RESPONSES, answer)
DELETE = Route("DELETE", "/things/{thing_id}", RESPONSES, answer)
PART = Route("GET", "/things/{thing_id}/parts/{part_id}", RESPONSES, answer)
MODEL = Route("GET", "/names/{name:path}", FILES, answer)
HEALTH = Route("GET", "/health", ANY_KEY, answer)
TABLE = RouteTable((LIST, COUNT, GET, DELETE, PART, MODEL), (HEALTH,))


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("method", "path", "route", "params"),
    [
        ("GET", "/things", LIST, {}),
        ("HEAD", "/things", LIST, {}),
        ("POST", "/things/count", COUNT, {}),
        ("GET", "/things/count", GET, {"thing_id": "count"}),
        ("DELETE", "/things/a%2Fb", DELETE, {"thing_id": "a%2Fb"}),
        ("GET", "/things/a/parts/b", PART, {"thing_id": "a", "part_id": "b"}),
        ("GET", "/names/a/b/c", MODEL, {"name": "a/b/c"}),
        ("GET", "/names/", MODEL, {"name": ""}),
    ],
)
def test_a_path_has_its_route_with_and_without_the_prefix(
    prefix: str, method: str, path: str, route: Route, params: dict[str, str]
) -> None:
    match = TABLE.find(method, prefix + path)
    assert (match.route, dict(match.params), match.template) == (route, params, f"/v1{route.path}")
    assert match.access is route.access


@pytest.mark.parametrize(
    "path", ["/v1/v1/things", "/things/", "/v1//things", "//things", "things", "*", "", "/v1", "/v1/health"]
)
def test_an_unknown_path_has_none(path: str) -> None:
    match = TABLE.find("GET", path)
    assert (match.route, match.routes, match.template) == (None, {}, OTHER)


def test_a_path_of_the_server_has_no_prefix() -> None:
    assert TABLE.find("GET", "/health").route is HEALTH
    assert TABLE.find("GET", "/health").template == "/health"


def test_a_path_without_the_method_names_the_methods_that_it_has() -> None:
    match = TABLE.find("PUT", "/v1/things/count")
    assert match.route is None
    assert set(match.routes) == {"GET", "POST", "DELETE"}
    assert match.access is RESPONSES


def test_an_unknown_path_below_a_resource_needs_the_access_of_the_resource() -> None:
    assert TABLE.find("GET", "/v1/things/a/b/c/d").access is RESPONSES
    assert TABLE.find("GET", "/v1/others").access is None
    assert RouteTable(API_ROUTES, ()).find("GET", "/v1/organization/odd").access is ADMINISTRATION


@pytest.mark.parametrize(
    ("name", "resources"),
    [*API_ROUTES.modules.items(), *EXTENSION_ROUTES.modules.items(), *REFUSED_ROUTES.modules.items()],
)
def test_the_table_names_the_resources_of_the_rows_of_each_module(name: str, resources: tuple[str, ...]) -> None:
    routes: tuple[Route, ...] = import_from_string(name)
    assert sorted({route.path.split("/")[1] for route in routes}) == sorted(resources)


async def test_the_routes_of_a_resource_are_found_after_it_was_loaded() -> None:
    modules = modules_by_resource(API_ROUTES, EXTENSION_ROUTES)
    table = RouteTable((LIST,), (HEALTH,), modules)
    for path in ("/v1/files", "/batches/batch_1", "/v1/conversations/conv_1/items"):
        assert table.lacks(path)
        await table.load_for(path)
        assert not table.lacks(path)
        assert table.find("GET", path).route is not None
    assert table.find("GET", "/v1/files").access is FILES
    assert [path for path in ("/v1/things", "/health", "/unheard/of") if table.lacks(path)] == []


def test_the_lines_of_batches_are_those_of_the_routes_that_say_so() -> None:
    assert {f"/v1{route.path}" for route in API_ROUTES if route.batched} == {*get_args(BatchEndpoint)}


def test_every_create_that_takes_an_idempotency_key_has_a_delete_that_forgets_it() -> None:
    keyed = {(route.method, re.sub(r"/{\w+}$", "", route.path)) for route in API_ROUTES if route.keyed}
    assert {path for method, path in keyed if method == "POST"} == {
        path for method, path in keyed if method == "DELETE"
    }


def test_the_architecture_names_the_gates_in_their_order() -> None:
    # each gate has something to check: keys of two tenants, listed origins, and figures that only administrators see
    keys = [{"key": f"{tenant}-{'k' * 32}", "tenant": tenant} for tenant in ("one", "other")]
    config = StackConfig.model_validate({"inference": SCRIPTED, "kv_store": MEMORY, "server": {"api_keys": keys}})
    gates = Gates(config, CorsPolicy(["*"]))
    order = [getattr(gate, "__name__", "") for gate in (*gates.of_all, *gates.of_callers)]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert (
        re.findall(r"^\| `(\w+)` \|", text.partition("## The gates of a request")[2].partition("\n## ")[0], re.M)
        == order
    )
