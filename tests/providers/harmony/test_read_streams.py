"""The reader over very many streams: good ones read as by openai-harmony, bad ones end well."""

import json
import random
from typing import Any

import pytest
from openai_harmony import (  # pyright: ignore[reportMissingTypeStubs] - typed in its source, without the marker file
    Role,
    StreamableParser,
)

from apis.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from providers.inference.harmony.vocabulary import VOCABULARY_SIZE, load_vocabulary
from tests.providers.harmony.turns import READ_TOOLS as TOOLS
from tests.providers.harmony.turns import check_order, encode, joined, read, reader

WORDS = [
    "Hello",
    " world",
    "\n\n",
    "naïve",
    "日本語",
    "👩‍👩‍👧",
    " {",
    '"a"',
    ": 1}",
    "functions.add",
    "to=",
    " <|",
    "end|>",
    " ",
]


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12)))


def some_message(rng: random.Random) -> tuple[str, str]:
    """Header and body of a message as the model was taught them."""
    kind = rng.randrange(6)
    if kind < 3:
        return f"<|channel|>{('analysis', 'commentary', 'final')[kind]}", some_text(rng)
    if kind == 3:
        return "<|channel|>commentary to=functions.add <|constrain|>json", json.dumps({"a": some_text(rng)})
    if kind == 4:
        return " to=functions.shell<|channel|>commentary", "$" + some_text(rng)
    return " to=python<|channel|>analysis code", "x = " + some_text(rng)


def some_turn(rng: random.Random) -> list[int]:
    ids: list[int] = []
    for index in range(rng.randrange(1, 5)):
        header, body = some_message(rng)
        ids += encode(f"{'<|start|>assistant' if index else ''}{header}<|message|>")
        end = "<|call|>" if "to=" in header else rng.choice(["<|return|>", "<|end|>"])
        ids += [*load_vocabulary().encode(body), *encode(end)]
    return ids


def oracle(ids: list[int]) -> list[Any]:
    parser = StreamableParser(load_vocabulary().encoding, role=Role.ASSISTANT)
    for token in ids:
        parser.process(token)
    expected: list[Any] = []
    names = {"functions.add": "add", "functions.shell": "shell", "python": "python"}
    for message in parser.messages:
        text = "".join(getattr(part, "text", "") for part in message.content)
        if message.recipient is not None:
            id_ = f"call_{sum(isinstance(one, ToolCallStart) for one in expected) + 1}"
            name = names[message.recipient]
            expected += [ToolCallStart(id_, name, name != "add"), ToolArgumentsDelta(id_, text)]
        elif message.channel == "analysis":
            expected.append(ReasoningDelta(text))
        else:
            expected.append(TextDelta(text, (), "commentary" if message.channel == "commentary" else "final_answer"))
    return expected


def marked(deltas: list[Any]) -> list[Any]:
    """Messages of the same kind that follow each other, marked as messages by themselves."""
    out: list[Any] = []
    for delta in deltas:
        match out[-1] if out else None, delta:
            case TextDelta(_, _, phase), TextDelta(text, _, now) if now == phase:
                out.append(TextDelta(text, (), phase, begins_message=True))
            case ReasoningDelta(), ReasoningDelta(text):
                out.append(ReasoningDelta(text, begins_message=True))
            case _:
                out.append(delta)
    return out


def test_well_formed_turns_read_as_by_openai_harmony() -> None:
    rng = random.Random(1)
    for _ in range(400):
        ids = some_turn(rng)
        one = reader(TOOLS)
        deltas = joined(one.feed(ids))
        assert deltas == marked(oracle(ids))
        assert one.repair_count == 0


def test_any_cut_of_a_stream_gives_the_same() -> None:
    rng = random.Random(2)
    request = TOOLS.model_copy(update={"stop": ["world", " {\n\n"]})
    for index in range(400):
        ids = some_turn(rng)
        for _ in range(index % 3):
            ids[rng.randrange(len(ids))] = rng.choice([200005, 200006, 200007, 200008, 200003, 12, 199999])
        cuts = rng.sample(range(len(ids)), rng.randrange(len(ids)))
        whole, pieces = read(ids, request), read(ids, request, cuts=cuts)
        assert joined(pieces) == joined(whole)
        assert read(ids, request, cuts=range(len(ids)))[-1] == whole[-1]


@pytest.mark.parametrize("count", [8_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_malformed_streams_end_well(count: int) -> None:
    rng = random.Random(3)
    good = [some_turn(rng) for _ in range(200)]
    marks = [200002, 200003, 200005, 200006, 200007, 200008, 200012]
    odd = [199998, 199999, 200013, VOCABULARY_SIZE - 1, VOCABULARY_SIZE, -1, 10**9]
    words = [
        token
        for word in ("assistant", " to=", "functions", ".add", "analysis", "final", " json", "user")
        for token in encode(word)
    ]
    for index in range(count):
        if index % 2:
            ids = [rng.choice(rng.choice((marks, marks, odd, words, words))) for _ in range(rng.randrange(1, 16))]
        else:
            turn = good[rng.randrange(len(good))]
            at = rng.randrange(len(turn))
            ids = turn[max(0, at - 10) : at + 6]
            ids[rng.randrange(len(ids))] = rng.choice(rng.choice((marks, odd, words)))
        one = reader(TOOLS)
        deltas = [*one.feed(ids), *one.finish("stop" if index % 3 else "length", input_tokens=0, cached_tokens=0)]
        check_order(deltas)
        assert one.output_tokens == len(ids) or one.is_stopped
        assert 0 <= one.reasoning_tokens <= len(ids)


def test_ids_of_all_the_vocabulary_in_any_order_end_well() -> None:
    rng = random.Random(4)
    for _ in range(500):
        check_order(read([rng.randrange(-5, VOCABULARY_SIZE + 5) for _ in range(200)], TOOLS))
