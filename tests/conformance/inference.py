"""The laws of every Inference: run each of `LAWS` over a `Subject` made of the provider under test."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import pytest

from apis.chat import ChatRequest
from apis.deltas import (
    DelayedOutput,
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    ReasoningSummaryDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from apis.errors import ModelNotFound, Unsupported
from apis.inference import Inference

PATIENCE_S = 30
STOP_WITHIN_S = 1


@dataclass(frozen=True)
class Subject:
    """A started provider and requests for it: one answered in text, one by a call, one for a model that is not there,
    and one whose answer is very long. `stopped` is set when the work for that one has ended, where this can be seen.
    """

    inference: Inference
    text: ChatRequest
    long: ChatRequest
    call: ChatRequest | None = None
    unknown: ChatRequest | None = None
    stopped: asyncio.Event | None = None


def check_steps(steps: Sequence[DeltaBatch]) -> list[Delta]:
    """The deltas of a whole chat, once they are found to keep the laws of `Inference.chat`."""
    assert all(steps), "a step is empty"
    deltas = [delta for step in steps for delta in step]
    assert [isinstance(delta, Finish) for delta in deltas] == [False] * (len(deltas) - 1) + [True], (
        "Finish is not one, last"
    )
    begun: set[str] = set()
    for delta in deltas:
        match delta:
            case ToolCallStart(call_id, name):
                assert call_id not in begun, f"call {call_id} began twice"
                assert call_id
                assert name
                begun.add(call_id)
            case ToolArgumentsDelta(call_id, text):
                assert call_id in begun, f"arguments for {call_id}, which has not begun"
                text.encode()
            case TextDelta(text) | ReasoningDelta(text) | RefusalDelta(text):
                text.encode()
            case DelayedOutput():
                pass  # counts deltas, and is no part of the answer
            case ReasoningSummaryDelta():
                raise AssertionError("a provider yields no summaries")
            case Finish(reason, usage):
                assert reason != "tool_calls" or begun, "tool_calls without a call"
                assert 0 <= usage.cached_tokens <= usage.input_tokens
                assert 0 <= usage.reasoning_tokens <= usage.output_tokens
    return deltas


async def drain(inference: Inference, request: ChatRequest) -> list[Delta]:
    """The deltas of a whole chat, checked."""
    steps: list[DeltaBatch] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(inference.chat(request)) as chat:
        async for step in chat:
            steps.append(step)  # noqa: PERF401 - what came before a failure is worth seeing
    return check_steps(steps)


async def its_models_are_listed(subject: Subject) -> None:
    models = await subject.inference.models()
    assert models
    assert len({model.id for model in models}) == len(models)
    assert subject.text.model in {model.id for model in models}
    for model in models:
        assert model.id
        assert model.owned_by
        assert model.created >= 0
        assert model.context_tokens is None or model.context_tokens > 0


async def text_is_answered(subject: Subject) -> None:
    deltas = await drain(subject.inference, subject.text)
    assert any(isinstance(delta, TextDelta) and delta.text for delta in deltas)


async def a_call_is_made(subject: Subject) -> None:
    if subject.call is None:
        pytest.skip("this provider is not asked for calls")
    deltas = await drain(subject.inference, subject.call)
    assert any(isinstance(delta, ToolCallStart) for delta in deltas)
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == "tool_calls"


async def chats_may_run_at_once(subject: Subject) -> None:
    answers = await asyncio.gather(*(drain(subject.inference, subject.text) for _ in range(8)))
    assert len(answers) == 8


async def a_chat_that_is_left_stops_and_others_go_on(subject: Subject) -> None:
    chat = subject.inference.chat(subject.long)
    async with asyncio.timeout(PATIENCE_S):
        await anext(chat)
    async with asyncio.timeout(STOP_WITHIN_S):
        await chat.aclose()
        if subject.stopped is not None:
            await subject.stopped.wait()
    await drain(subject.inference, subject.text)


async def a_cancelled_chat_stops_and_others_go_on(subject: Subject) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async with aclosing(subject.inference.chat(subject.long)) as chat:
            async for _ in chat:
                begun.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    task.cancel()
    async with asyncio.timeout(STOP_WITHIN_S):
        with pytest.raises(asyncio.CancelledError):
            await task
        if subject.stopped is not None:
            await subject.stopped.wait()
    await drain(subject.inference, subject.text)


async def a_chat_that_is_never_begun_costs_nothing(subject: Subject) -> None:
    await subject.inference.chat(subject.text).aclose()


async def an_unknown_model_is_an_error_before_the_first_step(subject: Subject) -> None:
    if subject.unknown is None:
        pytest.skip("this provider answers for every model")
    with pytest.raises(ModelNotFound):
        await drain(subject.inference, subject.unknown)


async def tokens_are_counted_or_declared_uncountable(subject: Subject) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with suppress(Unsupported):
            assert await subject.inference.count_tokens(subject.text) > 0


Law = Callable[[Subject], Awaitable[None]]
LAWS: tuple[Law, ...] = (
    its_models_are_listed,
    text_is_answered,
    a_call_is_made,
    chats_may_run_at_once,
    a_chat_that_is_left_stops_and_others_go_on,
    a_cancelled_chat_stops_and_others_go_on,
    a_chat_that_is_never_begun_costs_nothing,
    an_unknown_model_is_an_error_before_the_first_step,
    tokens_are_counted_or_declared_uncountable,
)
