"""From a request of the Decisions API to the questions that models read."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, assert_never, cast

import orjson

from apis.chat import ImagePart, ImageUrl, TextPart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest, predicate_options
from apis.errors import InvalidRequest
from apis.wire.decisions import (
    ChoiceQuestion,
    CreateDecision,
    DecisionCustomCall,
    DecisionFunctionCall,
    DecisionImage,
    DecisionItem,
    DecisionJson,
    DecisionOutput,
    DecisionOutputText,
    DecisionRefusal,
    DecisionText,
    PredicateQuestion,
    Question,
    ScoreQuestion,
)

Part = TextPart | ImagePart
WirePart = DecisionText | DecisionImage | DecisionJson | DecisionOutputText | DecisionRefusal
MAX_JSON_LEVELS: Final = 32
MAX_JSON_VALUES: Final = 10_000
MAX_JSON_BYTES: Final = 256 * 1024


def convert_decision(decision: CreateDecision) -> DecisionRequest:
    """Return the request that models read. Raises InvalidRequest, naming the field, for a choice that is there twice,
    an output without a call, and JSON that is too large."""
    instructions, parts = _convert_input(decision.input)
    questions = [_convert_question(question, f"questions[{at}]") for at, question in enumerate(decision.questions)]
    return DecisionRequest(
        model=decision.model,
        instructions=instructions,
        input=parts,
        questions=questions,
        prompt_cache_key=decision.prompt_cache_key,
    )


def find_images(decision: CreateDecision) -> dict[str, str]:
    """Return the place of each image by its URL."""
    places: dict[str, str] = {}
    for at, item in enumerate(decision.input if isinstance(decision.input, list) else ()):
        name = "output" if isinstance(item, DecisionOutput) else "content"
        places |= _list_images(getattr(item, name, None), f"input[{at}].{name}")
    for at, question in enumerate(decision.questions):
        places |= _list_images(question.instructions, f"questions[{at}].instructions")
    return places


def _list_images(content: Any, param: str) -> Iterator[tuple[str, str]]:
    for at, part in enumerate(cast("list[Any]", content) if isinstance(content, list) else ()):
        if isinstance(part, DecisionImage):
            yield part.image_url, f"{param}[{at}].image_url"


def _convert_input(value: str | Sequence[DecisionItem]) -> tuple[str, list[Part]]:
    """Return the instructions of the developer with which an input begins, and the rest as parts. More than one message
    of the user is a transcript."""
    if isinstance(value, str):
        return "", [TextPart(text=value)]
    instructions: list[str] = []
    first = 0
    while first < len(value) and (text := _read_instructions(value[first])) is not None:
        instructions.append(text)
        first += 1
    parts = _PartList()
    if len(value) == first + 1 and getattr(value[first], "role", None) == "user":
        parts.add_content(getattr(value[first], "content", ""), f"input[{first}].content")
    else:
        calls: set[tuple[str, str]] = set()
        for at in range(first, len(value)):
            parts.add_item(value[at], f"input[{at}]", calls)
    return "\n\n".join(instructions), parts.join()


def _read_instructions(item: DecisionItem) -> str | None:
    """Return the text of a message of the developer or the system; None of any other item."""
    if getattr(item, "role", None) not in ("developer", "system"):
        return None
    content: str | Sequence[DecisionText] = getattr(item, "content", "")
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _PartList:
    """Parts of a prompt. Neighbouring texts become one part, because there may be 100,000 of them."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._texts: list[str] = []

    def join(self) -> list[Part]:
        """Return the parts that were added."""
        self._end_text()
        return self._parts

    def add_item(self, item: DecisionItem, param: str, calls: set[tuple[str, str]]) -> None:
        """Add one item of a transcript under its heading. Raises InvalidRequest for an output without its call."""
        match item:
            case DecisionFunctionCall():
                calls.add(("function", item.call_id))
                self._texts += [f"[call of {_tool_name(item)}]\n", item.arguments]
            case DecisionCustomCall():
                calls.add(("custom", item.call_id))
                self._texts += [f"[call of {_tool_name(item)}]\n", item.input]
            case DecisionOutput():
                kind = "function" if item.type == "function_call_output" else "custom"
                if (kind, item.call_id) not in calls:
                    raise InvalidRequest(
                        f"No {kind} call with the call_id '{item.call_id}' is before its output.",
                        param=f"{param}.call_id",
                        code="invalid_value",
                    )
                self._texts.append("[output of the call]\n")
                self.add_content(item.output, f"{param}.output")
            case _:
                self._texts.append(f"[{item.role}]\n")
                self.add_content(item.content, f"{param}.content")
        self._texts.append("\n\n")

    def add_content(self, content: str | Sequence[WirePart], param: str) -> None:
        """Add a text, or parts on lines of their own. Raises InvalidRequest for JSON that is too large."""
        if isinstance(content, str):
            self._texts.append(content)
            return
        for at, part in enumerate(content):
            if at:
                self._texts.append("\n")
            match part:
                case DecisionImage():
                    self._end_text()
                    self._parts.append(ImagePart(image_url=ImageUrl(url=part.image_url, detail=part.detail)))
                case DecisionJson():
                    self._texts.append(_render_json(part, f"{param}[{at}].data"))
                case DecisionRefusal():
                    self._texts.append(part.refusal)
                case DecisionText() | DecisionOutputText():
                    self._texts.append(part.text)
                case _:
                    assert_never(part)

    def _end_text(self) -> None:
        if self._texts:
            self._parts.append(TextPart(text="".join(self._texts)))
            self._texts = []


def _tool_name(call: DecisionFunctionCall | DecisionCustomCall) -> str:
    return f"{call.namespace}.{call.name}" if call.namespace else call.name


def _render_json(part: DecisionJson, param: str) -> str:
    """Return the JSON of a part. Raises InvalidRequest for one beyond OpenAI's limits."""
    layer: list[Any] = [part.data]
    levels = values = 0
    while layer:
        levels += 1
        inner: list[Any] = []
        for each in layer:
            inner += cast("dict[str, Any]", each).values() if isinstance(each, dict) else each
        values += len(inner)
        layer = [value for value in inner if isinstance(value, dict | list)]
    data = orjson.dumps(part.data)
    if levels > MAX_JSON_LEVELS or values > MAX_JSON_VALUES or len(data) > MAX_JSON_BYTES:
        raise InvalidRequest(
            f"The JSON of one part has at most {MAX_JSON_LEVELS} levels, {MAX_JSON_VALUES} values and {MAX_JSON_BYTES} "
            "bytes. Send less, or text.",
            param=param,
            code="invalid_value",
        )
    return data.decode()


def _convert_question(question: Question, param: str) -> DecisionQuestion:
    match question:
        case PredicateQuestion():
            options = predicate_options()
        case ChoiceQuestion():
            _refuse_twins(question, param)
            options = [
                DecisionOption(text=_choice_text(choice.value), description=choice.description or "")
                for choice in question.choices
            ]
        case ScoreQuestion():
            options = [
                DecisionOption(text=level.label, description=level.description or "") for level in question.levels
            ]
        case _:
            assert_never(question)
    parts = _PartList()
    parts.add_content(question.instructions, f"{param}.instructions")
    return DecisionQuestion(kind=question.type, instructions=parts.join(), options=options, param=param)


def _choice_text(value: str | bool) -> str:  # noqa: FBT001 - a value
    return value if isinstance(value, str) else str(value).lower()


def _refuse_twins(question: ChoiceQuestion, param: str) -> None:
    seen: set[tuple[type, str | bool]] = set()
    for at, choice in enumerate(question.choices):
        key = type(choice.value), choice.value
        if key in seen:
            raise InvalidRequest(
                "Two choices have the same value. Each is an option of its own.",
                param=f"{param}.choices[{at}].value",
                code="invalid_value",
            )
        seen.add(key)
