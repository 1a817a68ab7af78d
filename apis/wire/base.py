"""The base of all request models, the fields that several requests share, and the JSON of the SDK's own models."""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar, cast, get_args
from weakref import ref

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from apis.wire.field_rows import FieldRow, refused_fields

if TYPE_CHECKING:
    from pydantic import JsonValue as JsonValue
else:
    JsonValue = Any
    """A value that was read from JSON. Pydantic's own type would call Python for each part of it, to find nothing."""

ModelT = TypeVar("ModelT", bound=BaseModel)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Phase = Literal["commentary", "final_answer"]


REFUSED_FIELD: Final = "refused_field"
"""Type of the validation error of a field that `FIELD_ROWS` refuses; its context has the `row`."""


class Wire(BaseModel):
    """A part of a request. It is strict, so a number in quotes is not a number, and it drops unknown fields, except
    those that `FIELD_ROWS` refuses."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)

    def __init_subclass__(cls, **options: Any) -> None:
        """Add the check of refused fields to a model that has any, so that no other model pays for it."""
        super().__init_subclass__(**options)
        rows = refused_fields(kind.__name__ for kind in cls.__mro__)
        if rows:
            cls.refuse_fields = model_validator(mode="before")(partial(_refuse, rows))  # pyright: ignore[reportAttributeAccessIssue] - pydantic collects it


Order = Literal["asc", "desc"]


class ListParams(Wire):
    """Query of a listing; `after` is the id of the last entry of the page before."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=20, ge=1, le=100)
    order: Order = "desc"


def _refuse(rows: Mapping[str, FieldRow], value: Any) -> Any:
    if isinstance(value, dict):
        sent = cast("dict[str, Any]", value)
        for name in rows.keys() & sent.keys():
            if sent[name] is not None and sent[name] not in rows[name].accepted:
                raise PydanticCustomError(REFUSED_FIELD, "refused", {"row": rows[name]})
    return cast("Any", value)


class ToolWire(Wire):
    """A declaration of a tool. The facts of a type of declaration are methods and constants of its class. Its schema is
    built at once, as that of an item is, because requests and items share it."""

    model_config = ConfigDict(defer_build=False)

    runs_at_client: ClassVar[bool] = False
    """True for the tools that only the client runs."""

    @classmethod
    def type_names(cls) -> tuple[str, ...]:
        """Return the names of the type, its usual one first."""
        return get_args(cls.model_fields["type"].annotation)

    @classmethod
    def choice_names(cls) -> tuple[str, ...]:
        """Return the types of `tool_choice` that choose such a tool."""
        return cls.type_names()

    def echo(self) -> dict[str, Any]:
        """Return the tool as the response shows it, for the validation by the SDK's types."""
        return self.model_dump(exclude_none=True, by_alias=True)


def dump_sent(value: Any) -> Any:
    """Return a part of a request as JSON of all that was sent, also what is never dumped, such as secrets."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        sent = {fields[name].alias or name: getattr(value, name) for name in fields if name in value.model_fields_set}
        return {name: dump_sent(each) for name, each in sent.items() if each is not None}
    if isinstance(value, dict):
        return {name: dump_sent(each) for name, each in cast("dict[str, Any]", value).items()}
    return [dump_sent(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def load_json(text: str) -> Any:
    """Return the value of a JSON text that a model wrote. Raises ValueError and RecursionError for another text."""
    try:
        return orjson.loads(text)
    except ValueError:
        if text.isascii() and "\\u" not in text:
            raise
    # lone surrogates and their escapes may be in JSON, but orjson refuses them
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def value_to_kept_json(value: Any) -> bytes:
    """Return a value as JSON in bytes of just its length, for what is kept while it waits, or in a cache: the bytes of
    orjson keep the whole buffer that they were written to, 4 KiB or more. Raises orjson.JSONEncodeError."""
    return bytes(memoryview(orjson.dumps(value)))


def sdk_model_to_json(model: BaseModel) -> bytes:
    """Return a model of the SDK as the API writes it: without the fields that were never set."""
    if model.__pydantic_private__ is not None and (data := remembered_json(model)) is not None:
        return data
    try:
        # pydantic's serializers would make a request that is not streamed about a tenth dearer
        return orjson.dumps(model, fields_to_write)
    except orjson.JSONEncodeError:  # above all for integers of more than 64 bits
        serializer: Any = model.__pydantic_serializer__  # model_dump_json() would decode the bytes to text
        return serializer.to_json(model, by_alias=True, exclude_unset=True, warnings=False)


def sdk_model_to_python(model: BaseModel) -> dict[str, Any]:
    """Return what `sdk_model_to_json` writes as dicts and lists, which share their texts with the model."""
    fields = fields_to_write(model)
    if isinstance(fields, orjson.Fragment):
        return orjson.loads(orjson.dumps(fields))
    return {name: _value_to_python(value) for name, value in fields.items()}


def _value_to_python(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return sdk_model_to_python(value)
    if isinstance(value, dict):
        return {key: _value_to_python(each) for key, each in cast("dict[str, Any]", value).items()}
    return [_value_to_python(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


_JSON_KEY: Final = "_json"
"""Key of a model's private attributes, which pydantic copies with the model and writes nowhere."""


def remember_json(model: ModelT, data: bytes = b"") -> ModelT:
    """Remember `data`, or the JSON that the model has now, as the JSON of this model, which is not changed from now
    on; return the model."""
    object.__setattr__(model, "__pydantic_private__", {_JSON_KEY: (ref(model), data or sdk_model_to_json(model))})
    return model


def remembered_json(model: BaseModel) -> bytes | None:
    """Return the JSON that was remembered for this very model; None for every other one, also for its copies."""
    private: dict[str, Any] | None = model.__pydantic_private__
    if private is None or _JSON_KEY not in private:
        return None
    owner, data = private[_JSON_KEY]
    return data if owner() is model else None  # a copy has the attribute, too


def fields_to_write(model: BaseModel) -> dict[str, Any] | orjson.Fragment:
    """Return the fields of a model of the SDK that are set, by the names that they have in JSON; the value of one may
    be another model. Where its JSON is remembered, return that. It is orjson's `default`."""
    if model.__pydantic_private__ is not None and (data := remembered_json(model)) is not None:
        return orjson.Fragment(data)
    fields: dict[str, Any] = vars(model)
    names, extra = model.__pydantic_fields_set__, model.__pydantic_extra__
    if len(names) != len(fields) + (len(extra) if extra else 0):
        fields = fields.copy()
        for name in fields.keys() - names:  # these are few: a new dict of all the others would take twice as long
            del fields[name]
    if aliases := _aliases(type(model)):
        fields = {aliases.get(name, name): value for name, value in fields.items()}
    return {**fields, **extra} if extra else fields


@cache
def _aliases(model_class: type[BaseModel]) -> Mapping[str, str]:
    """Return the names in JSON of the fields that have another name in Python."""
    return {name: field.alias for name, field in model_class.model_fields.items() if field.alias}
