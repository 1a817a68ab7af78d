"""The laws of every Moderation: run each of `LAWS` over a provider whose model judges by the words of `word_judge.py`,
in pieces of 200 characters."""

from collections.abc import Awaitable, Callable

import pytest

from apis.chat import TextPart
from apis.errors import InvalidRequest, StackError
from apis.moderation import CATEGORIES, Moderation


async def harmless_text_has_a_low_score_in_every_category(moderation: Moderation) -> None:
    scores = await moderation.judge([TextPart(text="a flower")])
    assert {*scores.scores} == {*CATEGORIES}
    assert all(0 <= score < 0.5 for score in scores.scores.values())
    assert not scores.flagged
    assert (scores.model, scores.has_text, scores.has_images) == (moderation.model, True, False)


async def what_is_harmful_is_flagged_by_its_category(moderation: Moderation) -> None:
    for text, expected in (("kill", {"violence"}), ("scum and a teapot", {"hate", "sexual"})):
        scores = await moderation.judge([TextPart(text=text)])
        assert scores.flagged == expected
        assert {category for category, score in scores.scores.items() if score > 0.5} == expected


async def a_long_text_is_judged_to_its_end(moderation: Moderation) -> None:
    short = await moderation.judge([TextPart(text="x")])
    scores = await moderation.judge([TextPart(text="scum " + "a flower " * 60 + "kill")])
    assert scores.flagged == {"violence", "hate"}
    assert scores.usage.input_tokens > 500
    assert scores.usage.output_tokens >= 3 * short.usage.output_tokens


async def a_text_beyond_all_bounds_is_refused_by_its_field(moderation: Moderation) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await moderation.judge([TextPart(text="x" * 20_000)], param="input[1]")
    assert caught.value.param == "input[1]"


async def an_empty_text_is_judged(moderation: Moderation) -> None:
    assert not (await moderation.judge([TextPart(text="")])).flagged


async def a_model_that_fails_flags_nothing_but_raises(moderation: Moderation) -> None:
    with pytest.raises(StackError):
        await moderation.judge([TextPart(text="broken")])


async def its_model_is_one_of_its_names(moderation: Moderation) -> None:
    assert moderation.model in moderation.names
    assert moderation.window_chars > 0
    moderation.require_name(moderation.model, "model")
    with pytest.raises(InvalidRequest):
        moderation.require_name("no-such-model", "model")


Law = Callable[[Moderation], Awaitable[None]]
LAWS: tuple[Law, ...] = (
    harmless_text_has_a_low_score_in_every_category,
    what_is_harmful_is_flagged_by_its_category,
    a_long_text_is_judged_to_its_end,
    a_text_beyond_all_bounds_is_refused_by_its_field,
    an_empty_text_is_judged,
    a_model_that_fails_flags_nothing_but_raises,
    its_model_is_one_of_its_names,
)
