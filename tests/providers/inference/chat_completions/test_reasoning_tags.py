"""Tags around reasoning: split anywhere, in linear time, and replayed as the model's template takes them."""

import random
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.chat import TENANT_SALT_PREFIX, ChatRequest
from apis.deltas import Delta, DeltaBatch, Finish, ReasoningDelta, TextDelta, TokenLogprob, ToolCallStart, Usage
from apis.sink import Stream, put_all
from providers.inference.chat_completions.reasoning_tags import (
    TAGS_PRESETS,
    OpeningModels,
    ReasoningTags,
    TagSink,
    TagSplitter,
    find_tags,
    replay_reasoning,
)

THINK = TAGS_PRESETS["think"]
FINISH = Finish("stop", Usage(1, 2))


def split(texts: Sequence[str], tags: ReasoningTags = THINK, **options: bool) -> tuple[str, str]:
    """Return the reasoning and the text of an answer in these deltas."""
    splitter = TagSplitter(tags, **{"starts_open": tags.starts_open, "holds_text": True, **options})
    deltas: list[Delta] = []
    for text in filter(None, texts):
        deltas += splitter.feed([TextDelta(text)])
    deltas += splitter.feed([FINISH])
    assert deltas[-1] is FINISH
    assert all(delta.text for delta in deltas[:-1] if isinstance(delta, TextDelta | ReasoningDelta))
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return thought, "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>\nI think.\n\nSo.\n</think>\n\nHello.\n", ("I think.\n\nSo.", "Hello.\n")),
        (" \n<think>a</think>b", ("a", "b")),
        ("<think>\n\n</think>\n\nHello.", ("", "Hello.")),
        ("Hello.", ("", "Hello.")),
        ("\n Hello.", ("", "\n Hello.")),
        ("<thin Hello.", ("", "<thin Hello.")),
        ("<thin", ("", "<thin")),
        ("The tag <think>x</think> opens.", ("", "The tag <think>x</think> opens.")),
        ("<think>a</think>The tag <think>x</think> opens.", ("a", "The tag <think>x</think> opens.")),
        ("<think>a < b </ c </thin </think>d", ("a < b </ c </thin ", "d")),
        ("<think>cut off</thi", ("cut off</thi", "")),
        ("<think>a\n", ("a", "")),
        ("", ("", "")),
        ("  ", ("", "  ")),
        ("I think.\n</think>\n\nHello.", ("I think.", "Hello.")),
        ("</think>Hello.", ("", "Hello.")),
        ("I think.</think>", ("I think.", "")),
        ('I think.</think>{"a": 1}', ("I think.", '{"a": 1}')),
        ("I < think.</think>Hello</think>.", ("I < think.", "Hello</think>.")),
        ("The tag `</think>` closes.", ("", "The tag `</think>` closes.")),
        ("Open with <think>, close with </think>.", ("", "Open with <think>, close with </think>.")),
        ("<think>a</think>\n<think>b</think>\nc", ("a\nb", "c")),
        ("<think>a <think>b</think></think>c", ("a <think>b", "c")),
        ("a</think></think>b", ("a", "b")),
        ("<think>a</think><", ("a", "<")),
        ("<think>a</think></thin", ("a", "</thin")),
        ("<think>a</think><b>c</b>", ("a", "<b>c</b>")),
    ],
)
def test_tags_are_split_at_every_place(answer: str, expected: tuple[str, str]) -> None:
    assert split([answer]) == expected
    assert split([*answer]) == expected
    for one in range(len(answer) + 1):
        for two in range(one, len(answer) + 1):
            assert split([answer[:one], answer[one:two], answer[two:]]) == expected


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("I think.\n</think>\n\nHello.", {}, ("I think.", "Hello.")),
        ("<think>\nI think.\n</think>\n\nHello.", {}, ("I think.", "Hello.")),
        ('{"a":1}', {"json_answer": True}, ("", '{"a":1}')),
        ('Hm.</think>{"a":1}', {"json_answer": True}, ("Hm.", '{"a":1}')),
        ("{ cut off", {}, ("{ cut off", "")),
        ("Hello.", {"starts_open": False}, ("", "Hello.")),
    ],
)
def test_a_template_may_open_the_tag(answer: str, options: dict[str, bool], expected: tuple[str, str]) -> None:
    for cut in range(len(answer) + 1):
        assert split([answer[:cut], answer[cut:]], TAGS_PRESETS["think-open"], **options) == expected


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("holds_text", [True, False])
def test_an_answer_without_tags_is_no_thought_of_a_model_that_may_open_one(*, holds_text: bool, reason: Any) -> None:
    """The preset was found by the name. What was cut off is a thought, what ended by itself is the answer."""
    splitter = TagSplitter(TAGS_PRESETS["think-open"], starts_open=True, holds_text=holds_text, is_guess=True)
    deltas = [*splitter.feed([TextDelta("Hel")]), *splitter.feed([TextDelta("lo.")])]
    deltas += splitter.feed([Finish(reason, Usage())])
    texts = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    assert texts == ("Hello." if reason == "stop" else "")
    assert thoughts == ("" if reason == "stop" and holds_text else "Hello.")


def test_in_a_stream_the_answer_after_a_lone_close_is_a_message_of_its_own() -> None:
    """The thought has left as text; the phase of the answer begins another message."""
    splitter = TagSplitter(THINK, starts_open=False)
    texts = ("I th", "ink.</th", "ink>\n\n", "Hel", "lo.")
    deltas = [delta for text in texts for delta in splitter.feed([TextDelta(text)])]
    assert deltas == [
        TextDelta("I th"),
        TextDelta("ink."),
        TextDelta("Hel", phase="final_answer"),
        TextDelta("lo.", phase="final_answer"),
    ]
    assert splitter.has_lone_close


async def test_a_model_that_had_a_lone_close_is_read_as_thinking_from_then_on() -> None:
    """Until an answer of it has no tag. The prompts of one tenant do not change another's answers."""
    models = OpeningModels()

    async def ask(*texts: str, tenant: str = "a", end: Sequence[Delta] = (FINISH,)) -> list[Delta]:
        request = ChatRequest.model_validate(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "is_streamed": True,
                "cache_salt": f"{TENANT_SALT_PREFIX}{tenant}",
            }
        )

        async def batches() -> AsyncGenerator[DeltaBatch]:
            for text in texts:
                yield [TextDelta(text)]
            for delta in end:
                yield [delta]

        answer = Stream[Delta](lambda sink: put_all(batches(), TagSink(sink, request, THINK, models)))
        return [delta async for batch in answer for delta in batch]

    await ask("Hm.</think>", "Hello.")
    assert [*models] == [("a", "m")]
    assert await ask("Hello.", tenant="b") == [TextDelta("Hello."), FINISH]
    assert await ask("Hm.</think>", "Hello.") == [ReasoningDelta("Hm."), TextDelta("Hello."), FINISH]
    assert await ask("<think>Hm.</think>", "Hello.") == [ReasoningDelta("Hm."), TextDelta("Hello."), FINISH]
    assert await ask("Hello.") == [ReasoningDelta("Hello."), TextDelta("Hello."), FINISH]
    assert not models
    assert await ask("Hello.") == [TextDelta("Hello."), FINISH]
    # a model closes its thought before it calls a tool
    called = [ToolCallStart("c", "f"), Finish("tool_calls", Usage())]
    await ask("Hm.</think>", "Hello.")
    assert await ask("Let me see.", end=called) == [ReasoningDelta("Let me see."), TextDelta("Let me see."), *called]
    assert await ask("Let me see.", end=called) == [TextDelta("Let me see."), *called]
    # an answer that a limit cuts off may be a thought; not all of them are
    cut = [Finish("length", Usage())]
    await ask("Hm.</think>", "Hello.")
    for _ in range(2):
        assert await ask("Hm. Hm.", end=cut) == [ReasoningDelta("Hm. Hm."), *cut]
    assert await ask("Hm.</think>", "Hello.") == [ReasoningDelta("Hm."), TextDelta("Hello."), FINISH]
    for _ in range(3):
        assert await ask("Hm. Hm.", end=cut) == [ReasoningDelta("Hm. Hm."), *cut]
    assert await ask("Hm. Hm.", end=cut) == [TextDelta("Hm. Hm."), *cut]


PARTS = ("<think>", "</think>", "<", "/", "think", ">", "\n", " ", "a", "é\U0001fae0")


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.data())
def test_cuts_change_nothing(answer: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[start:end] for start, end in pairwise([0, *cuts, len(answer)])]
    for tags in (THINK, TAGS_PRESETS["think-open"]):
        whole = split([answer], tags)
        assert split(pieces, tags) == whole
        # nothing is lost but tags at the beginning and the blanks around them
        remaining = "".join(whole).translate({10: None, 32: None})
        missing = len(answer.translate({10: None, 32: None})) - len(remaining)
        opened, closed = answer.count("<think>"), answer.count("</think>")
        sizes = {a * len("<think>") + b * len("</think>") for a in range(opened + 1) for b in range(closed + 1)}
        assert missing in sizes


@pytest.mark.parametrize("fill", ["a", "\n", "<", "</think", " \n", "</think\n"])
def test_the_time_is_linear(fill: str) -> None:
    """Many deltas of one character or a few, in reasoning and before it."""
    for begin in ("<think>", ""):
        splitter = TagSplitter(THINK, starts_open=False)
        splitter.feed([TextDelta(begin)])
        began = time.process_time()
        for _ in range(60_000 // len(fill)):
            splitter.feed([TextDelta(fill)])
        assert time.process_time() - began < 2


def test_other_deltas_come_after_the_text_before_them() -> None:
    splitter = TagSplitter(THINK, starts_open=False)
    call = ToolCallStart("c", "f")
    assert splitter.feed([TextDelta("<think>a</"), call]) == [ReasoningDelta("a"), ReasoningDelta("</"), call]
    parsed = TagSplitter(THINK, starts_open=False)
    assert parsed.feed([ReasoningDelta("a"), TextDelta("<think>b")]) == [ReasoningDelta("a"), TextDelta("<think>b")]


def test_log_probabilities_are_those_of_the_text() -> None:
    splitter = TagSplitter(THINK, starts_open=False)
    tokens = ("<th", "ink>", "a", "</think>", "\n\n", "Hel", "lo")
    deltas: list[Delta] = []
    for token in tokens:
        deltas += splitter.feed([TextDelta(token, (TokenLogprob(token, -0.5, list(token.encode())),))])
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    assert [(delta.text, [one.token for one in delta.logprobs]) for delta in texts] == [
        ("Hel", ["Hel"]),
        ("lo", ["lo"]),
    ]


async def test_a_batch_in_which_nothing_is_certain_is_not_passed_on() -> None:
    async def batches() -> AsyncGenerator[DeltaBatch]:
        for text in ("<thi", "nk>", "a", "</think>", "b"):
            yield [TextDelta(text)]
        yield [FINISH]

    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "is_streamed": True}
    request = ChatRequest.model_validate(fields)
    answer = Stream[Delta](lambda sink: put_all(batches(), TagSink(sink, request, THINK)))
    received_batches = [batch async for batch in answer]
    assert received_batches == [[ReasoningDelta("a")], [TextDelta("b")], [FINISH]]


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("Qwen/Qwen3-8B", "think"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "think-open"),
        ("Qwen/Qwen3.5-35B-A3B", "think-open"),
        ("MiniMaxAI/MiniMax-M2.1", "think-open"),
        ("zai-org/GLM-4.7", "think-open"),
        ("zai-org/GLM-4.6", "think"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-r1"),
        ("mistralai/Magistral-Small-2509", "magistral"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed-oss"),
        ("SmolLM2-135M-Instruct", None),
    ],
)
def test_the_preset_is_found_by_the_models_name(model: str, preset: Any) -> None:
    assert find_tags("auto", model) == (None if preset is None else TAGS_PRESETS[preset])
    assert find_tags(None, model) is None
    assert find_tags("think", model) == THINK


@pytest.mark.parametrize("replay", ["content", "field", "none"])
def test_reasoning_is_replayed_as_the_template_takes_it(replay: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "reasoning": "earlier", "content": "1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "reasoning": "now", "content": [{"type": "text", "text": "2"}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    request = ChatRequest.model_validate({"model": "m", "messages": messages})
    replayed = replay_reasoning(request, ReasoningTags(replay=replay)).messages
    if replay == "field":
        assert replayed == request.messages
        return
    assert [message.reasoning for message in replayed] == [None] * 5
    assert replayed[1].content == "1"
    written: Any = replayed[3].content
    texts = [part.text for part in written]
    assert texts == (["<think>\nnow\n</think>\n\n", "2"] if replay == "content" else ["2"])


def test_random_answers_of_many_cuts() -> None:
    """Longer answers than the property test's, cut into deltas of one to nine characters."""
    chance = random.Random(5)
    for _ in range(300):
        thought = "".join(chance.choice(("a", "<", "</", "think", ">\n", " ")) for _ in range(40)).replace(
            "</think>", ""
        )
        answer = f"<think>{thought}x</think>y{thought}"
        pieces: list[str] = []
        at = 0
        while at < len(answer):
            size = chance.randint(1, 9)
            pieces.append(answer[at : at + size])
            at += size
        assert split(pieces) == (f"{thought}x".lstrip("\n"), f"y{thought}")
