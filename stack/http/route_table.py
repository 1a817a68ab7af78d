"""RouteTable: finds the route of a request, once, for all that treat routes differently."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from starlette.types import Scope

from apis.imports import import_from_string
from stack.http.request_record import OTHER
from stack.http.route import Access, Route

_MATCH_KEY: Final = "stack.route_match"
_PREFIX: Final = "/v1"
_ONE_PART: Final = "{}"
_REST: Final = "{:path}"


class Match(NamedTuple):
    """The routes of a path by method; the one of the request's method, if there is one; and the path's parameters.

    `template` names the path in metrics. `access` is also known of an unknown path below a known resource.
    """

    route: Route | None
    routes: Mapping[str, Route]
    template: str
    params: Mapping[str, str]
    access: Access | None


def set_match(scope: Scope, match: Match) -> None:
    """Store the match of the request whose scope it is."""
    scope[_MATCH_KEY] = match
    scope["path_params"] = match.params


def get_match(scope: Scope) -> Match:
    """Return the match that the edge stored."""
    return scope[_MATCH_KEY]


class _Node:
    """The routes whose paths end here, by method, and what may follow, by the next part of the path."""

    def __init__(self) -> None:
        self.following: dict[str, _Node] = {}
        self.routes: dict[str, Route] = {}
        self.template = ""


class RouteTable:
    """The routes of one app. `api_routes` have paths with and without the prefix /v1, `server_routes` only without.

    Those of a resource in `modules` are imported by `load`, from each "module:NAME" of its rows: a server has in memory
    what its clients use.
    """

    def __init__(
        self,
        api_routes: Iterable[Route],
        server_routes: Iterable[Route],
        modules: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._root = _Node()
        self._server_paths: dict[str, _Node] = {}
        self._resources: dict[str, Access] = {}
        self._fixed: dict[str, dict[str, Match]] = {}
        self._modules = dict(modules or {})
        for route in server_routes:
            node = self._server_paths.setdefault(route.path, _Node())
            node.routes[route.method], node.template = route, route.path
        self._add(api_routes)

    def lacks(self, path: str) -> bool:
        """Return true if the path is of a resource that has to be loaded before a route of it is found."""
        return path not in self._fixed and _resource_of(path) in self._modules

    async def load_for(self, path: str) -> None:
        """Load the resource of the path, in a thread."""
        await asyncio.to_thread(self.load, _resource_of(path))

    def load(self, resource: str) -> None:
        """Import the rows of a resource, and add them."""
        rows = [route for name in self._modules.get(resource, ()) for route in import_from_string(name)]
        self._add(route for route in rows if _resource_of(route.path) == resource)
        self._modules.pop(resource, None)

    def find(self, method: str, path: str) -> Match:
        """Return what is known of a request by its method and path."""
        match = self._fixed.get(path, {}).get(method)
        return self._search(method, path) if match is None else match

    def _add(self, routes: Iterable[Route]) -> None:
        new_routes = [*routes]
        for route in new_routes:
            node = self._root
            for part in _parts(route.path):
                is_parameter = part.startswith("{")
                key = (_REST if part.endswith(_REST[1:]) else _ONE_PART) if is_parameter else part
                node = node.following.setdefault(key, _Node())
            node.routes[route.method], node.template = route, f"{_PREFIX}{route.path}"
            self._resources.setdefault(_resource_of(route.path), route.access)
        paths = [f"{prefix}{route.path}" for prefix in (_PREFIX, "") for route in new_routes if "{" not in route.path]
        self._fixed |= {path: {method: self._search(method, path) for method in ("GET", "POST")} for path in paths}

    def _search(self, method: str, path: str) -> Match:
        inner = _without_prefix(path)
        nodes = [*_walk(self._root, _parts(inner))] if inner.startswith("/") else []
        if path in self._server_paths:
            nodes.append((self._server_paths[path], ()))
        served_method = "GET" if method == "HEAD" else method
        for node, values in nodes:
            if route := node.routes.get(served_method):
                params = dict(zip(_parameter_names(route.path), values, strict=True))
                return Match(route, node.routes, node.template, params, route.access)
        routes = {name: route for node, _ in reversed(nodes) for name, route in node.routes.items()}
        if nodes:
            access = next(iter(nodes[0][0].routes.values())).access
            return Match(None, routes, nodes[0][0].template, {}, access)
        return Match(None, routes, OTHER, {}, self._resources.get(_resource_of(path)))


def _without_prefix(path: str) -> str:
    return path.removeprefix(_PREFIX) if path.startswith(f"{_PREFIX}/") else path


def _resource_of(path: str) -> str:
    """Return the first part of the path below /v1."""
    return _parts(_without_prefix(path))[0]


def _parts(path: str) -> list[str]:
    return path[1:].split("/")


def _parameter_names(path: str) -> list[str]:
    return [part[1:-1].removesuffix(":path") for part in _parts(path) if part.startswith("{")]


def _walk(node: _Node, parts: Sequence[str]) -> Iterator[tuple[_Node, tuple[str, ...]]]:
    """Yield the nodes that a path reaches, with the values of its parameters; a fixed part goes before a parameter."""
    if not parts:
        if node.routes:
            yield node, ()
        return
    part, rest = parts[0], parts[1:]
    if (following := node.following.get(part)) is not None:
        yield from _walk(following, rest)
    if part and (following := node.following.get(_ONE_PART)) is not None:
        for end, values in _walk(following, rest):
            yield end, (part, *values)
    if (following := node.following.get(_REST)) is not None:
        yield following, ("/".join(parts),)
