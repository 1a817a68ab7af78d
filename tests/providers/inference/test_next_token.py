"""NextToken: the arguments that it passes to the function, and the output that it makes of the returned tokens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.chat import ChatRequest
from apis.deltas import Finish, TextDelta, Usage
from apis.errors import ConfigError, ContextLengthExceeded, Overloaded, Unsupported, UpstreamError, UpstreamTimeout
from providers.inference.next_token import NextToken
from tests.conformance.inference import LAWS, Law, Subject, drain
from tests.support.models import token_functions

MODEL = "next-token"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@asynccontextmanager
async def started(function: str = "plain", **fields: Any) -> AsyncGenerator[NextToken]:
    """A provider that runs; a function without a module is one of token_functions."""
    name = function if ":" in function else f"tests.support.models.token_functions:{function}"
    provider = NextToken(NextToken.Config.model_validate({"function": name, **fields}))
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


def chat_request(said: str = "hi", **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": MODEL, "messages": [{"role": "user", "content": said}], **fields})


@pytest.fixture(autouse=True)
def forgetful() -> None:
    token_functions.calls.clear()
    token_functions.stuck.clear()
    token_functions.released.clear()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_next_token_conforms(law: Law) -> None:
    async with started() as provider:
        call, unknown = chat_request("weather", tools=[TOOL]), chat_request().model_copy(update={"model": "other"})
        await law(Subject(provider, chat_request(), chat_request("endless"), call, unknown))


async def test_tokens_are_counted() -> None:
    async with started() as provider:
        finish = (await drain(provider, chat_request()))[-1]
        assert finish == Finish("stop", Usage(await provider.count_tokens(chat_request()), 16, 0, 3))


# --- the arguments of the function -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["recorded", "named"])
async def test_the_function_receives_all_tokens_the_temperature_and_the_start_of_a_prompt(function: str) -> None:
    async with started(function) as provider:
        await drain(provider, chat_request(temperature=0.5))
        await drain(provider, chat_request())
        prompt = await provider.count_tokens(chat_request())
    calls = len(token_functions.calls) // 2
    expected = [(prompt + count, temperature, count == 0) for temperature in (0.5, 1.0) for count in range(calls)]
    assert token_functions.calls == expected


async def test_a_file_may_hold_the_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.support.models.token_functions import plain as mine\n")
    async with started(f"{file}:mine") as provider:
        deltas = await drain(provider, chat_request())
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "Hello there!"


# --- how an answer ends ----------------------------------------------------------------------------------------------


async def test_an_answer_ends_with_its_limit_and_with_the_context() -> None:
    async with started(context_tokens=120) as provider:
        room = 120 - await provider.count_tokens(chat_request("endless"))
        for fields, count in (({"max_completion_tokens": 5}, 5), ({}, room), ({"max_completion_tokens": 999}, room)):
            finish = (await drain(provider, chat_request("endless", **fields)))[-1]
            assert isinstance(finish, Finish)
            assert (finish.reason, finish.usage.output_tokens) == ("length", count)
        with pytest.raises(ContextLengthExceeded):
            await drain(provider, chat_request("hi " * 120))


async def test_an_answer_ends_with_a_stop_token_and_before_a_stop_string() -> None:
    async with started() as provider:
        by_token = await drain(provider, chat_request("endless", stop_token_ids=[token_functions.WORD]))
        by_text = await drain(provider, chat_request(stop="there"))
    for deltas in (by_token, by_text):
        finish = deltas[-1]
        assert isinstance(finish, Finish)
        assert finish.reason == "stop"
    assert "".join(delta.text for delta in by_text if isinstance(delta, TextDelta)) == "Hello "


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "said"), [("text", "str"), ("beyond", "201088"), ("truth", "True")])
async def test_an_invalid_token_is_an_error(function: str, said: str) -> None:
    async with started(function) as provider:
        with pytest.raises(UpstreamError, match=said):
            await drain(provider, chat_request())


async def test_a_function_that_raises_fails_its_own_chat_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with started("fails_to_call") as provider:
        failing, well = await asyncio.gather(
            drain(provider, chat_request("weather", tools=[TOOL])),
            drain(provider, chat_request()),
            return_exceptions=True,
        )
    assert isinstance(failing, UpstreamError)
    assert failing.message == "The model's function failed with ValueError."
    assert isinstance(well, list)
    assert "secret" in caplog.text


async def test_a_function_that_hangs_is_a_timeout() -> None:
    async with started("sticks", token_timeout_s=0.05) as provider:
        with pytest.raises(UpstreamTimeout, match="token_timeout_s"):
            await drain(provider, chat_request())
        token_functions.released.set()


async def test_answers_wait_for_each_other_unless_the_function_is_concurrent() -> None:
    for fields, alone in (({}, True), ({"concurrent": True, "max_running": 2}, False)):
        token_functions.calls.clear()
        async with started("recorded", **fields) as provider:
            await asyncio.gather(*(drain(provider, chat_request()) for _ in range(2)))
        begun = [new for _, _, new in token_functions.calls]
        assert len(begun) == 32
        assert not alone or begun.index(True, 1) == 16


async def test_too_many_waiting_are_refused() -> None:
    async with started("sticks", max_waiting=1) as provider:
        running = asyncio.create_task(drain(provider, chat_request()))
        await asyncio.to_thread(token_functions.stuck.wait, 10)
        others = [asyncio.create_task(drain(provider, chat_request())) for _ in range(2)]
        (refused,), (waiting,) = await asyncio.wait(others, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(refused.exception(), Overloaded)
        token_functions.released.set()
        await asyncio.gather(running, waiting)


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.5}, {"seed": 0}, {"logprobs": True}, {"top_k": 4}, {"logit_bias": {"1": 2}}, {"presence_penalty": 1}],
    ids=lambda fields: next(iter(fields)),
)
async def test_fields_that_only_the_function_could_honour_are_refused_by_name(fields: dict[str, Any]) -> None:
    async with started() as provider:
        with pytest.raises(Unsupported) as caught:
            await drain(provider, chat_request(**fields))
    assert caught.value.param == next(iter(fields))


async def test_fields_without_effect_are_accepted() -> None:
    async with started() as provider:
        await drain(provider, chat_request(top_p=1, top_k=-1, frequency_penalty=0, logprobs=False, logit_bias={}))


async def test_an_answer_that_is_not_what_was_demanded_is_an_error() -> None:
    async with started() as provider:
        demands: list[tuple[str, dict[str, Any]]] = [
            ("hi", {"response_format": SCHEMA}),
            ("hi", {"tools": [TOOL], "tool_choice": "required"}),
            ("weather", {"tools": [TOOL], "tool_choice": "none"}),
        ]
        for said, demand in demands:
            with pytest.raises(UpstreamError, match="did not keep to"):
                await drain(provider, chat_request(said, **demand))
        await drain(provider, chat_request("weather", tools=[TOOL], tool_choice="required"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("plain:", "form"),
        ("no_such_module:f", 'no module "no_such_module"'),
        ("tests.support.models.token_functions:nothing", 'no function "nothing"'),
        ("no/such/file.py:f", 'no file "no/such/file.py"'),
        ("waits", "async"),
        ("narrow", "must take"),
    ],
)
async def test_a_function_that_cannot_be_had_is_an_error_at_the_start(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with started(function):
            pass


async def test_a_flood_of_one_tenant_delays_another_by_one_answer() -> None:
    """Tenants take turns, and a tenant's own cache salts give it no second turn."""
    salts = [f"{'a' * 32}.{number:032}" for number in range(3)]
    order: list[str] = []

    async def ask(provider: NextToken, salt: str) -> None:
        await drain(provider, chat_request(cache_salt=salt))
        order.append(salt[:8])

    async with started("sticks", max_waiting=3) as provider:
        running = asyncio.create_task(ask(provider, f"tenant-{'a' * 32}"))
        await asyncio.to_thread(token_functions.stuck.wait, 10)
        loud = [asyncio.create_task(ask(provider, salt)) for salt in salts]
        await asyncio.sleep(0)
        quiet = asyncio.create_task(ask(provider, f"tenant-{'b' * 32}"))
        await asyncio.sleep(0.05)
        token_functions.released.set()
        await asyncio.gather(running, *loud, quiet)
    assert order == ["tenant-a", "tenant-b", "aaaaaaaa", "aaaaaaaa", "aaaaaaaa"]
