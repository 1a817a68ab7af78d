"""The parts of `stack bench` that count: distributions, event streams cut anywhere, bounded memory."""

import random
import statistics
import sys
from typing import Any

import orjson
import pytest

from stack.bench.figures import Distribution, RequestFailed, Tally
from stack.bench.stream_figures import StreamFigures

RESPONSE = {"id": "resp_1", "status": "completed", "usage": {"output_tokens": 2}, "error": None}
DELTA = b'event: response.output_text.delta\ndata: {"delta":"event: response.completed\\n .delta\\n"}\n\n'


def stream(kind: str = "response.completed", **fields: Any) -> bytes:
    event = {"type": kind, "response": {**RESPONSE, **fields.pop("response", {})}, **fields}
    return (
        b'event: response.created\ndata: {"type":"response.created"}\n\n: keep-alive\n\n'
        + DELTA * 3
        + f"event: {kind}\n".encode()
        + b"data: %b\n\n" % orjson.dumps(event)
        + b"data: [DONE]\n\n"
    )


def read(data: bytes, size: int) -> tuple[dict[str, Any], Tally]:
    tally = Tally()
    reader = StreamFigures(tally, 0.0)
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    return reader.response(), tally


def test_a_stream_is_read_alike_wherever_it_is_cut() -> None:
    data = stream()
    for size in range(1, len(data) + 1):
        response, tally = read(data, size)
        assert response["id"] == "resp_1"
        assert tally.first_token.count == 1
        assert tally.inter_token.count <= 2
    assert read(data, 1)[1].inter_token.count == 2
    assert read(data, len(data))[1].inter_token.count == 0


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (stream("response.failed", response={"status": "failed", "error": {"code": "server_error"}}), "failed server_"),
        (stream("error", code="overloaded", message="Later."), "stream overloaded"),
        (stream().partition(b"event: response.completed")[0], "stream broke off"),
        (stream()[:-60], "stream broke off"),
        (b"", "stream broke off"),
    ],
)
def test_a_stream_that_fails_or_breaks_off_is_an_error(data: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        read(data, 50)
    assert caught.value.kind.startswith(kind)


def test_a_stream_is_not_held_in_memory() -> None:
    reader = StreamFigures(Tally(), 0.0)
    for _ in range(1000):
        reader.feed(DELTA)
    assert sys.getsizeof(reader._tail) < 200  # type: ignore[attr-defined] # its only text
    assert reader._end is None  # type: ignore[attr-defined] # until the last event


def test_quantiles_are_exact_within_two_percent() -> None:
    rng = random.Random(5)
    times = [rng.lognormvariate(-5, 2) for _ in range(10_000)]
    distribution = Distribution()
    for seconds in times:
        distribution.record(seconds)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    for share in (0.5, 0.9, 0.99):
        assert distribution.quantile_s(share) == pytest.approx(cuts[round(share * 100) - 1], rel=0.025)
    assert distribution.quantile_s(1.0) == pytest.approx(max(times), rel=0.02)
    assert Distribution().quantile_s(0.5) is None
    for odd in (0.0, -1.0, 1e9):
        distribution.record(odd)
    assert distribution.count == 10_003


def test_kinds_of_errors_are_bounded() -> None:
    tally = Tally()
    for number in range(1000):
        tally.count_error(f"500 code_{number}")
    assert len(tally.errors) <= 33
    assert tally.errors.total() == 1000
