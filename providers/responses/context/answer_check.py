"""Checks that an answer has the JSON schema that its request demands, for engines that do not promise it."""

import asyncio
import importlib
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

import orjson

from apis.chat import ChatJsonSchemaFormat, ChatRequest, Message
from apis.deltas import Delta, DeltaBatch, Finish, RefusalDelta, TextDelta, ToolCallStart
from apis.errors import UpstreamError
from apis.inference import Inference, Model
from apis.wire.text_format import JsonSchema
from providers.responses.events.response_object import add_usage

_CITATION_MARK: Final = re.compile("【[^【】]{0,200}】")
_MAX_PROBLEM_CHARS: Final = 400
_CORRECTION: Final = (
    "That answer does not have the required form: {problem} Answer again, with nothing but JSON that is valid against "
    "this schema:\n{schema}"
)


class _Validator(Protocol):
    """Validator of jsonschema_rs (https://docs.rs/jsonschema)."""

    def validate(self, instance: Any) -> None: ...


class CheckedInference(Inference):
    """Wraps an Inference whose engine may ignore the schema of the chat's format. With `is_streamed`, the text leaves
    as it is generated, and the chat fails if it is wrong in the end; otherwise the text waits until it is checked, and
    the model gets one more try. Raises UpstreamError for a wrong answer."""

    def __init__(self, inference: Inference, *, is_streamed: bool) -> None:
        self._inference = inference
        self._is_streamed = is_streamed

    async def models(self) -> Sequence[Model]:
        return await self._inference.models()

    async def count_tokens(self, request: ChatRequest) -> int:
        return await self._inference.count_tokens(request)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        form = request.response_format
        is_last = self._is_streamed or not isinstance(form, ChatJsonSchemaFormat)
        answer = _Answer(delays_text=not is_last)
        async with aclosing(answer.read(self._inference, request)) as batches:
            async for batch in batches:
                yield batch
        if answer.finish is None:
            return
        problem = None
        if isinstance(form, ChatJsonSchemaFormat) and answer.is_final:
            problem = await asyncio.to_thread(_find_problem_but_for_marks, answer.text, form.json_schema)
        if problem is None:
            yield (*answer.delayed, answer.finish)
            return
        if is_last or request.max_completion_tokens == answer.finish.usage.output_tokens:
            raise _wrong_answer(problem)
        second = _Answer(delays_text=True)
        async with aclosing(second.read(self._inference, _build_retry(request, answer, problem))) as batches:
            async for batch in batches:
                yield batch
        if second.finish is None:
            return
        if second.is_final and isinstance(form, ChatJsonSchemaFormat):
            problem = await asyncio.to_thread(_find_problem_but_for_marks, second.text, form.json_schema)
            if problem is not None:
                raise _wrong_answer(problem)
        usage = add_usage(answer.finish.usage, second.finish.usage)
        yield (*second.delayed, Finish(second.finish.reason, usage))


class _Answer:
    """One answer of the model. With `delays_text`, its text is in `delayed` as long as it may be the final answer.
    `finish` is its Finish."""

    def __init__(self, *, delays_text: bool) -> None:
        self.delayed: list[Delta] = []
        self.finish: Finish | None = None
        self._delays_text = delays_text
        self._texts: list[str] = []
        self._has_other_output = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_final(self) -> bool:
        """The answer is a whole text, without a call or a refusal."""
        return self.finish is not None and self.finish.reason == "stop" and not self._has_other_output

    async def read(self, inference: Inference, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Yield the answer's batches without its Finish and its delayed text."""
        async with aclosing(inference.chat(request)) as batches:
            async for batch in batches:
                output: list[Delta] = []
                for delta in batch:
                    if isinstance(delta, Finish):
                        self.finish = delta
                        continue
                    if isinstance(delta, ToolCallStart | RefusalDelta):
                        self._has_other_output = True
                        output += self.delayed
                        self.delayed = []
                    if isinstance(delta, TextDelta) and delta.phase != "commentary":
                        self._texts.append(delta.text)
                        if self._delays_text and not self._has_other_output:
                            self.delayed.append(delta)
                            continue
                    output.append(delta)
                if output:
                    yield output


def _build_retry(request: ChatRequest, answer: _Answer, problem: str) -> ChatRequest:
    """Return the chat with the wrong answer and what is wrong about it."""
    assert isinstance(request.response_format, ChatJsonSchemaFormat)
    assert answer.finish is not None
    schema = orjson.dumps(request.response_format.json_schema.schema_).decode()
    wrong = [Message(role="assistant", content=answer.text)] if answer.text else []
    correction = Message(role="user", content=_CORRECTION.format(problem=problem, schema=schema))
    limit = request.max_completion_tokens
    return request.model_copy(
        update={
            "messages": [*request.messages, *wrong, correction],
            "tool_choice": "none" if request.tools else None,
            "max_completion_tokens": limit and max(1, limit - answer.finish.usage.output_tokens),
        }
    )


def _find_problem_but_for_marks(text: str, form: JsonSchema) -> str | None:
    """Return what is wrong about the answer, also without the marks of citations, which clients do not see in JSON."""
    problem = find_problem(text, form)
    if problem is None or "【" not in text:
        return problem
    return find_problem(_CITATION_MARK.sub("", text), form)


def find_problem(text: str, form: JsonSchema) -> str | None:
    """Return what is wrong about an answer of this format, as a sentence; None for a right one, and for a schema that
    cannot be checked."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        return f"it is not JSON ({exc})."
    # loaded by the first answer that needs it: 15 MB that most processes never use
    jsonschema: Any = importlib.import_module("jsonschema_rs")
    failure: type[Exception] = jsonschema.ValidationError
    try:
        validator: _Validator = jsonschema.validator_for(form.schema_, retriever=_refuse_reference)
    except (failure, ValueError):
        return None
    try:
        validator.validate(value)
    except failure as exc:
        place = "/".join(map(str, getattr(exc, "instance_path", ())))
        message = str(getattr(exc, "message", exc))[:_MAX_PROBLEM_CHARS]
        return f"at '{place}', {message}." if place else f"{message}."
    return None


def _refuse_reference(uri: str) -> Any:
    raise ValueError(f"a schema refers to no other document: {uri[:100]}")


def _wrong_answer(problem: str) -> UpstreamError:
    return UpstreamError(
        f"The model's answer is not valid against the schema in text.format: {problem}", param="text.format"
    )
