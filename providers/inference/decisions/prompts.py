"""The prompt of one question: the shared input first, so that it is read once, then the question and its labels."""

from collections.abc import Sequence
from typing import Any, Final

from apis.chat import ChatRequest, ContentPart, ImagePart, Message, TextPart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest
from apis.errors import Unsupported

_TASK: Final = (
    "You are a classifier. You read an input and a question with options, and reply with the letter of the right "
    "option only."
)
_LEVELS: Final = "The options are levels of one scale.\n"
_MAX_LISTED: Final = 8
"""Labels that are listed once more at the end of a question, which makes small models answer with one of them."""


def build_messages(
    request: DecisionRequest, question: DecisionQuestion, labels: Sequence[str], *, is_joined: bool
) -> list[Message]:
    """Return the messages of one question, whose options have these labels, in the order of the labels. With
    `is_joined` input and question are one message, as many chat templates demand."""
    instructions = f"{_TASK}\n\n{request.instructions}" if request.instructions else _TASK
    parts = [TextPart(text="# Input\n\n"), *request.input]
    question_parts = [
        TextPart(text="# Question\n\n"),
        *question.instructions,
        TextPart(text=_render_options(question, labels)),
    ]
    system = Message(role="system", content=instructions)
    if is_joined:
        return [system, _user_message([*parts, TextPart(text="\n\n"), *question_parts])]
    return [system, _user_message(parts), _user_message(question_parts)]


def build_chat(model: str, messages: Sequence[Message], **fields: Any) -> ChatRequest:
    """Return the request of one row, with further fields."""
    return ChatRequest.model_validate({"model": model, "messages": [*messages], **fields})


def refuse_images(request: DecisionRequest) -> None:
    """Raise Unsupported, naming the field, where the request has images: the model reads text only."""
    question_parts = ((f"{question.param}.instructions", question.instructions) for question in request.questions)
    places = [(request.input_param, request.input), *question_parts]
    for param, parts in places:
        if any(isinstance(part, ImagePart) for part in parts):
            raise Unsupported("Images are not supported by this model, which reads text only.", param=param)


def join_texts(parts: Sequence[TextPart | ImagePart]) -> str:
    """Return the texts of parts, joined."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _render_options(question: DecisionQuestion, labels: Sequence[str]) -> str:
    ranked = sorted(zip(labels, question.options, strict=True), key=lambda each: (len(each[0]), each[0]))
    lines = [f"{label}: {option.text}{_describe(option)}" for label, option in ranked]
    listed = f": {', '.join(label for label, _ in ranked)}." if len(lines) <= _MAX_LISTED else " of the list."
    scale = _LEVELS if question.kind == "score" else ""
    return f"\n\n{scale}" + "\n".join(lines) + f"\n\nAnswer with one letter{listed}"


def _describe(option: DecisionOption) -> str:
    return f" ({option.description})" if option.description else ""


def _user_message(parts: Sequence[TextPart | ImagePart]) -> Message:
    """Return a message whose neighbouring texts are one part; one of text only has a text."""
    joined: list[ContentPart] = []
    texts: list[str] = []
    for part in [*parts, None]:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        if texts:
            joined.append(TextPart(text="".join(texts)))
            texts = []
        if part is not None:
            joined.append(part)
    if len(joined) == 1 and isinstance(joined[0], TextPart):
        return Message(role="user", content=joined[0].text)
    return Message(role="user", content=joined)
