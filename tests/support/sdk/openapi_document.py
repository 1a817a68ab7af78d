"""The OpenAPI document of the server, which FastAPI generates from the table of routes and the request models."""

import re
import warnings
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, cast

import orjson
from fastapi import Query
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.warnings import UnsupportedFieldAttributeWarning

from stack import __version__
from stack.http.route import Route
from stack.http.routes.server import METRICS_ROUTE, SERVER_ROUTES
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES

_PATH_PARAMETER: Final = re.compile(r"{(\w+)(?::\w+)?}")


class ErrorFields(BaseModel):
    """The `error` of OpenAI's error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response whose status is 400 or more."""

    error: ErrorFields


def described_routes() -> Sequence[tuple[str, Route]]:
    """Return the routes that the document describes, each after its path."""
    api_routes = (*API_ROUTES, *EXTENSION_ROUTES)
    return (
        *((f"/v1{route.path}", route) for route in api_routes),
        *((route.path, route) for route in (*SERVER_ROUTES, METRICS_ROUTE)),
    )


def render_document() -> str:
    """Return the document as JSON, with a line for each operation and each schema."""
    api_routes = [_to_api_route(path, route) for path, route in described_routes()]
    with warnings.catch_warnings():
        # FastAPI ignores this warning where it builds a model; ours defer that until they are first used, which is here
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        document = get_openapi(title="Responses Stack", version=__version__, routes=api_routes)
    _mark_query_objects(document)
    document["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"api_key": []}, {}]  # a server without keys takes requests without one
    return f"{_in_lines(_relax_unions(document), 3)}\n"


def _in_lines(value: Any, depth: int) -> str:
    """Return the value as JSON with a line for each field of its objects, down to this depth."""
    if not (depth and isinstance(value, dict)):
        return orjson.dumps(value).decode()
    fields = cast("dict[str, Any]", value)
    lines = (f"{orjson.dumps(name).decode()}:{_in_lines(entry, depth - 1)}" for name, entry in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def _to_api_route(path: str, route: Route) -> APIRoute:
    """Return a route of FastAPI that has the parameters of ours; it is never served."""
    parameters = [_parameter(name, str) for name in _PATH_PARAMETER.findall(path)]
    if route.query is not None:
        parameters.append(_parameter("query", Annotated[route.query, Query()]))
    if route.body is not None:
        parameters.append(_parameter("body", route.body))
    extra: dict[str, Any] = {}
    if route.form is not None:
        extra = {"requestBody": {"content": {"multipart/form-data": {"schema": _form_schema(route.form, route)}}}}

    def endpoint() -> None: ...

    cast(Any, endpoint).__signature__ = Signature(parameters)
    return APIRoute(
        path,
        endpoint,
        methods=[route.method],
        name=route.handler.__name__,
        response_model=None,
        tags=[path.removeprefix("/v1").split("/")[1]],
        openapi_extra=extra or None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )


def _mark_query_objects(document: dict[str, Any]) -> None:
    """Say of each query parameter that is an object that its fields are sent as `name[field]`."""
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                name = str(parameter["schema"].get("$ref", "")).rpartition("/")[2]
                if parameter["in"] == "query" and schemas.get(name, {}).get("type") == "object":
                    parameter |= {"style": "deepObject", "explode": True}


def _parameter(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation)


def _form_schema(form: type[BaseModel], route: Route) -> dict[str, Any]:
    """Return the schema of a form with a file; a form nests fields as `name[field]`, which FastAPI does not know."""
    schema = form.model_json_schema() if form is not BaseModel else {}
    fields = _inline_references(schema.get("properties", {}), schema.get("$defs", {}))
    fields.pop("filename", None)  # which is a part of the file
    files = (route.file_field, *route.optional_files)
    return {
        "type": "object",
        "properties": {**{name: {"type": "string", "format": "binary"} for name in files}, **fields},
        "required": [route.file_field, *schema.get("required", ())],
    }


def _inline_references(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        if "$ref" in fields:
            return _inline_references(definitions[fields["$ref"].rpartition("/")[2]], definitions)
        return {key: _inline_references(entry, definitions) for key, entry in fields.items()}
    return (
        [_inline_references(entry, definitions) for entry in cast(list[Any], value)]
        if isinstance(value, list)
        else value
    )


def _relax_unions(value: Any) -> Any:
    """Return the schema with `anyOf` for `oneOf`: the branches of some of our unions overlap as schemas. Enumerations
    are sorted, because Python remembers equal literals in the order of the one that was imported first."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        relaxed = {"anyOf" if key == "oneOf" else key: _relax_unions(entry) for key, entry in fields.items()}
        if isinstance(names := relaxed.get("enum"), list):
            relaxed["enum"] = sorted(cast(list[Any], names), key=str)
        return relaxed
    return [_relax_unions(entry) for entry in cast(list[Any], value)] if isinstance(value, list) else value
