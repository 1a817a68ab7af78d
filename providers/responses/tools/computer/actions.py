"""The actions of a computer as a model is offered them: JSON schemas, and the arguments that come back."""

from typing import Annotated, Any, Final, cast

from openai.types.responses import ComputerAction
from pydantic import BeforeValidator, Field

from apis.wire.computer import MAX_ACTIONS
from providers.responses.tools.client import Arguments

_INTEGER: Final[dict[str, Any]] = {"type": "integer"}
_KEYS: Final[dict[str, Any]] = {"type": "array", "items": {"type": "string"}}
_BUTTONS: Final[dict[str, Any]] = {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]}
_POINT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"x": _INTEGER, "y": _INTEGER},
    "required": ["x", "y"],
    "additionalProperties": False,
}
_HELD_KEYS: Final[dict[str, Any]] = {**_KEYS, "description": "Keys to hold down meanwhile."}
_FIELDS: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "click": ({"x": _INTEGER, "y": _INTEGER, "button": _BUTTONS, "keys": _HELD_KEYS}, ("x", "y", "button")),
    "double_click": ({"x": _INTEGER, "y": _INTEGER, "keys": _HELD_KEYS}, ("x", "y")),
    "drag": ({"path": {"type": "array", "items": _POINT, "minItems": 2}, "keys": _HELD_KEYS}, ("path",)),
    "keypress": ({"keys": {**_KEYS, "description": "Pressed together, such as CTRL and C."}}, ("keys",)),
    "move": ({"x": _INTEGER, "y": _INTEGER, "keys": _HELD_KEYS}, ("x", "y")),
    "screenshot": ({}, ()),
    "scroll": (
        {"x": _INTEGER, "y": _INTEGER, "scroll_x": _INTEGER, "scroll_y": _INTEGER, "keys": _HELD_KEYS},
        ("x", "y", "scroll_x", "scroll_y"),
    ),
    "type": ({"text": {"type": "string"}}, ("text",)),
    "wait": ({}, ()),
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {"click": {"button": "left"}, "scroll": {"scroll_x": 0, "scroll_y": 0}}
"""Fields that models leave out although the schema requires them."""
ACTION_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"type": "string", "enum": [name]}, **properties},
            "required": ["type", *required],
            "additionalProperties": False,
        }
        for name, (properties, required) in _FIELDS.items()
    ]
}
"""JSON schema of one action, with the names of the API."""


def _complete_action(value: Any) -> Any:
    """Return the fields of an action that the API knows, with the defaults of those that are missing."""
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    name = fields.get("type")
    if not isinstance(name, str) or name not in _FIELDS:
        return fields
    names = {"type", *_FIELDS[name][0]}
    return {**_DEFAULTS.get(name, {}), **{key: item for key, item in fields.items() if key in names}}


_Action = Annotated[
    Annotated[ComputerAction, Field(discriminator="type")],
    BeforeValidator(_complete_action),
]


class ActionList(Arguments):
    """The arguments of `computer`."""

    actions: Annotated[list[_Action], Field(min_length=1, max_length=MAX_ACTIONS)]


class OneAction(Arguments):
    """The arguments of `computer_use_preview`."""

    action: _Action
