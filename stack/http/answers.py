"""What the resource routes answer: one object, a page of them, or that one is gone."""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from apis.storage.pages import Page
from stack.http.edge import json_response


def model_response(model: BaseModel) -> Response:
    """One of the SDK's objects, whole."""
    return value_response(model.model_dump(mode="json"))


def value_response(value: Any) -> Response:
    """Whatever JSON can say."""
    return json_response(orjson.dumps(value))


def page_response(page: Page[Any]) -> Response:
    """A page of the SDK's objects, as its cursors want it."""
    return list_response([each.model_dump(mode="json") for each in page.data], has_more=page.has_more)


def list_response(data: Sequence[dict[str, Any]], *, has_more: bool) -> Response:
    """A page of objects that are JSON by now."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return value_response({"object": "list", "data": [*data], "first_id": first, "last_id": last, "has_more": has_more})


def single_page_response(kind: str, data: Sequence[BaseModel], **fields: Any) -> Response:
    """All that there is, in the form of a page of `kind`."""
    found = [each.model_dump(mode="json") for each in data]
    return value_response({"object": kind, **fields, "data": found, "has_more": False, "next_page": None})


def deleted_response(object_id: str, kind: str) -> Response:
    """`kind` is the object that OpenAI answers with."""
    return value_response({"id": object_id, "object": kind, "deleted": True})
