"""RenderedPrompt: a request with the prompt that it refers to, as one request whose input a model can read."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from apis.errors import InvalidRequest, StackError
from apis.responses import CreateResponse
from apis.wire.item_parts import InputText, OutputText
from apis.wire.items import AssistantMessage, InputMessage, Item
from apis.wire.prompt import PromptReference
from providers.responses.prompts.template import DEFAULT_FIELDS, PromptMessage, PromptVersion
from providers.responses.prompts.template_text import ContentPart, TemplateText

MAX_TEXT_CHARS: Final = 10 * 2**20
"""Characters of a rendered prompt: a template may repeat a long value many times."""

_INPUT_PATH: Final = re.compile(r"input\[(\d+)\](?:\.content\[(\d+)\])?")
_ROOT_FIELD: Final = re.compile(r"[a-z_]+")
_MERGED_FIELDS: Final = frozenset({"text", "reasoning"})
"""Fields whose own fields have defaults one by one."""
Values = Mapping[str, str | ContentPart]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`request` has the prompt's messages before its own input, and its defaults. `sources` are the names of the
    variables that are images and files, by the index of the message and of the part."""

    request: CreateResponse
    message_count: int = 0
    sources: Mapping[tuple[int, int], str] | None = None
    default_fields: frozenset[str] = frozenset()
    has_text_input: bool = False

    @contextmanager
    def attribute_errors(self) -> Generator[None]:
        """Let errors about the rendered request name the places of the request as its client sent it."""
        try:
            yield
        except StackError as exc:
            param = exc.param or ""
            if own_param := self._find_own_param(param):
                exc.message = exc.message.replace(param, own_param)
                exc.param = own_param
            raise

    def _find_own_param(self, param: str) -> str | None:
        """Return the place in the client's request of a place in the rendered one; None where it is the same."""
        if (match := _INPUT_PATH.match(param)) and self.message_count:
            index = int(match[1])
            if index >= self.message_count:
                own_index = f"[{index - self.message_count}]"
                return "input" if self.has_text_input else f"input{own_index}{param[match.end(1) + 1 :]}"
            name = (self.sources or {}).get((index, int(match[2]))) if match[2] else None
            return f"prompt.variables.{name}{param[match.end() :]}" if name else "prompt"
        root = _ROOT_FIELD.match(param)
        return "prompt" if root is not None and root[0] in self.default_fields else None


def render_prompt(request: CreateResponse, reference: PromptReference, version: PromptVersion) -> RenderedPrompt:
    """Return the request with this version of the prompt. Its own fields win over those of the version. Raises
    InvalidRequest, naming the variable, where one is missing, unknown, or of a kind that its place cannot hold."""
    values: Values = reference.variables or {}
    _check_names(values, version.variables)
    _check_length(values, version)
    changes: dict[str, Any] = {"prompt": reference}
    if version.instructions_text is not None and request.instructions is None:
        changes["instructions"] = _render_text(version.instructions_text, values, "the instructions")
    sources: dict[tuple[int, int], str] = {}
    messages = [_render_message(message, index, values, sources) for index, message in enumerate(version.messages)]
    if messages:
        changes["input"] = [*messages, *_input_items(request)]
    default_fields = _build_defaults(request, version)
    changes |= default_fields
    if not (request.model or version.model):
        message = "Missing required parameter: 'model'. The prompt names no model."
        raise InvalidRequest(message, param="model", code="missing_required_parameter")
    return RenderedPrompt(
        request.model_copy(update=changes),
        len(messages),
        sources,
        frozenset(default_fields),
        has_text_input=isinstance(request.input, str),
    )


def _check_names(values: Values, names: frozenset[str]) -> None:
    for name in sorted(names - values.keys()):
        param = f"prompt.variables.{name}"
        raise InvalidRequest(
            f"Missing required parameter: '{param}'. The prompt has this variable.",
            param=param,
            code="missing_required_parameter",
        )
    for name in sorted(values.keys() - names):
        param = f"prompt.variables.{name:.64}"
        raise InvalidRequest(
            f"Invalid '{param}': the prompt has no such variable.", param=param, code="unknown_parameter"
        )


def _check_length(values: Values, version: PromptVersion) -> None:
    lengths = {name: len(_text_of(value)) for name, value in values.items()}
    texts: list[TemplateText] = [message.text for message in version.messages]
    if version.instructions_text is not None:
        texts.append(version.instructions_text)
    pieces = [piece for text in texts for piece in text.pieces]
    if sum(len(piece) if isinstance(piece, str) else lengths[piece.name] for piece in pieces) > MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"The prompt with its variables has more than {MAX_TEXT_CHARS} characters.",
            param="prompt.variables",
            code="string_above_max_length",
        )


def _text_of(value: str | ContentPart) -> str:
    if isinstance(value, str):
        return value
    return value.text if isinstance(value, InputText) else ""


def _render_message(
    message: PromptMessage, index: int, values: Values, sources: dict[tuple[int, int], str]
) -> InputMessage | AssistantMessage:
    if message.role == "assistant":
        text = _render_text(message.text, values, "a message of the model")
        return AssistantMessage(
            type="message", role="assistant", content=[OutputText.model_validate(_output_text(text))]
        )
    parts = message.text.render_parts(values)
    sources.update({(index, at): name for at, (_, name) in enumerate(parts) if name is not None})
    return InputMessage(type="message", role=message.role, content=[part for part, _ in parts])


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _render_text(text: TemplateText, values: Values, place: str) -> str:
    parts = text.render_parts(values)
    for part, name in parts:
        if name is not None:
            param = f"prompt.variables.{name}"
            message = f"Invalid '{param}': it stands in {place}, where only text can be, but is of type '{part.type}'."
            raise InvalidRequest(message, param=param, code="invalid_value")
    return "".join(part.text for part, _ in parts if isinstance(part, InputText))


def _input_items(request: CreateResponse) -> Sequence[Item]:
    if isinstance(request.input, str):
        return [InputMessage(type="message", role="user", content=request.input)]
    return request.input or ()


def _build_defaults(request: CreateResponse, version: PromptVersion) -> dict[str, Any]:
    """Return the fields of the version that the request leaves open, its options of text and reasoning merged."""
    defaults: dict[str, Any] = {}
    for name in DEFAULT_FIELDS:
        default, value = getattr(version, name), getattr(request, name)
        if default is None:
            continue
        if value in (None, ""):
            defaults[name] = default
        elif name in _MERGED_FIELDS:
            sent = {key: each for key, each in dict(value).items() if each is not None}
            defaults[name] = default.model_copy(update=sent)
    return defaults
