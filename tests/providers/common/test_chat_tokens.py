"""TokenCounter: what it counts, what it estimates and what it learns."""

import pytest

from apis.chat import ChatRequest
from apis.deltas import Usage
from apis.errors import CountingUnsupported, Unsupported, UpstreamError
from apis.responses import InputTokenCount
from providers.common.chat_tokens import TokenCounter, TokenCounters, measure_chat
from providers.inference.scripted import Scripted


class Uncounted(Scripted):
    """A model whose server fails to count with this error."""

    error: Exception = CountingUnsupported("cannot count")

    async def count_tokens(self, request: ChatRequest) -> int:
        raise self.error


def counter(error: Exception | None = None) -> TokenCounter:
    inference = Uncounted(Uncounted.Config())
    inference.error = error or inference.error
    return TokenCounter(inference)


def chat(content: object, model: str = "scripted") -> ChatRequest:
    return ChatRequest.model_validate({"model": model, "messages": [{"role": "user", "content": content}]})


async def test_an_exact_count_stays_exact_under_any_reported_usage() -> None:
    exact = TokenCounter(Scripted(Scripted.Config()))
    assert await exact.count(chat("one two")) == InputTokenCount(2)
    exact.record_usage(chat("one two"), Usage(1000, 1))
    assert exact.estimate(chat("x" * 396)) == 103


@pytest.mark.parametrize("error", [CountingUnsupported("no"), UpstreamError("down")])
async def test_no_count_is_an_estimate(error: Exception) -> None:
    assert await counter(error).count(chat("x" * 384)) == InputTokenCount(100, is_estimate=True)


async def test_a_chat_that_cannot_be_sent_has_no_estimate() -> None:
    with pytest.raises(Unsupported):
        await counter(Unsupported("no files", param="input")).count(chat("x"))


async def test_the_last_usage_of_each_model_corrects_its_estimates() -> None:
    tokens = counter()
    tokens.record_usage(chat("x" * 384), Usage(200, 5))
    tokens.record_usage(chat("x" * 384, "other"), Usage(50, 5))
    tokens.record_usage(chat("x" * 384), Usage(0, 5))
    assert tokens.estimate(chat("y" * 784)) == 400
    assert tokens.estimate(chat("y" * 784, "other")) == 100
    assert tokens.estimate(chat("y" * 784, "unknown")) == 200


async def test_what_one_tenant_teaches_changes_no_estimate_of_another() -> None:
    """A tenant whose prompts have unusual tokens, or that lies about them, does not shorten others' chats."""
    counters = TokenCounters(Scripted(Scripted.Config()))
    counters.of_tenant("a").record_usage(chat("x" * 384), Usage(200, 5))
    assert counters.of_tenant("a").estimate(chat("y" * 784)) == 400
    assert counters.of_tenant("b").estimate(chat("y" * 784)) == 200
    for number in range(1024):
        counters.of_tenant(f"tenant {number}")
    assert counters.of_tenant("a").estimate(chat("y" * 784)) == 200, "the oldest is forgotten"


@pytest.mark.parametrize(("reported", "ratio"), [(2**53, 4), (1, 0.25)])
async def test_a_mad_usage_is_bounded(reported: int, ratio: float) -> None:
    tokens = counter()
    tokens.record_usage(chat("x" * 384), Usage(reported, 0))
    assert tokens.estimate(chat("x" * 384)) == 100 * ratio


def test_pictures_count_by_number_and_text_by_bytes() -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 100_000}"}}
    assert measure_chat(chat([{"type": "text", "text": "x" * 384}, picture])) == 1100
    assert measure_chat(chat("語" * 100)) == 79
