"""Bytes that are no JSON, or JSON that must not be let in; and how long the server is busy with large bodies."""

import asyncio
import json
import re
import time
from collections import Counter
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ConfigDict, Field

from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from providers.common.fair_turns import CURRENT_TURN, turn_of
from stack.http import parsing
from stack.http.parsing import parse_object, read_object, read_request

INTEGERS = {
    b"9223372036854775807": 2**63 - 1,
    b"-9223372036854775808": -(2**63),
    b"18446744073709551615": 2**64 - 1,
    b"18446744073709551616": 2.0**64,
    b"-9223372036854775809": -(2.0**63),
    b"1" + b"0" * 300: 1e300,
}
UNPARSABLE: dict[str, bytes] = {
    "nothing": b"",
    "blank": b"  \n",
    "cut": b'{"model":',
    "two values": b"{} {}",
    "a comment": b'{"model": "m" /* why */}',
    "single quotes": b"{'model': 'm'}",
    "a leading zero": b'{"a": 01}',
    "a plus sign": b'{"a": +1}',
    "a trailing comma": b'{"a": 1,}',
    "a raw control character": b'{"a": "\x01"}',
    "a raw newline in text": b'{"a": "\n"}',
    "not a number": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "a number above all doubles": b'{"a": 1e400}',
    "a number below all doubles": b'{"a": -1e400}',
    "an integer of 4,301 digits": b'{"a": %b}' % (b"9" * 4301),
    "a lone surrogate in a value": rb'{"a": "\ud800"}',
    "a lone surrogate in a key": rb'{"\udc00": 1}',
    "surrogates the wrong way round": rb'{"a": "\udc00\ud800"}',
    "an unknown escape": rb'{"a": "\x41"}',
    "broken UTF-8": b'{"a": "\xff"}',
    "overlong UTF-8": b'{"a": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "a NUL after the end": b"{}\0",
    "100,000 open arrays": b"[" * 100_000,
    "100,000 open objects": b'{"a":' * 100_000,
    "100,000 arrays, closed": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}
REFUSED: dict[str, tuple[bytes, str | None]] = {
    "an array": (b"[1]", "invalid_type"),
    "a string": (b'"x"', "invalid_type"),
    "null": (b"null", "invalid_type"),
    "a number": (b"5", "invalid_type"),
    "a key twice": (b'{"model": "a", "model": "b"}', None),
    "a key twice, deep inside": (b'{"a": [{"b": {"c": 1, "c": 1}}]}', None),
    "a key twice, once escaped": (rb'{"ab": 1, "\u0061b": 2}', None),
    "65 levels": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "invalid_value"),
}


@pytest.mark.parametrize("body", UNPARSABLE.values(), ids=UNPARSABLE)
def test_what_is_no_json_is_refused_without_being_repeated(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert (caught.value.param, caught.value.code) == (None, None)
    place = r"( \(line \d+, column \d+\))?"
    assert re.fullmatch(
        rf"We could not parse the JSON body of your request{place}\.|The body is empty; it must be a JSON object\.",
        caught.value.message,
    )


@pytest.mark.parametrize(("body", "code"), REFUSED.values(), ids=REFUSED)
def test_json_that_is_no_request_is_refused(body: bytes, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert (caught.value.param, caught.value.code) == (None, code)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1e-400}', 0.0),
        (rb'{"a": "\u0000"}', "\0"),
        (rb'{"a": "\ud83d\ude00"}', "😀"),
        (b'{"a": -0}', 0),
        (b'{"a": 18446744073709551616}', 2**64),
        (b'\t{"a" : null}\r\n', None),
        (b'{"a":' + b"[" * 63 + b"]" * 63 + b"}", json.loads(b"[" * 63 + b"]" * 63)),
    ],
)
def test_unusual_json_is_read_with_its_value(body: bytes, value: Any) -> None:
    assert parse_object(body) == {"a": value}


class Inner(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(max_length=3, pattern="^[a-z]*$")


class Outer(BaseModel):
    model_config = ConfigDict(strict=True)

    count: int | None = Field(None, ge=1, le=2**31 - 1)
    share: float | None = Field(None, ge=0, le=1)
    yes: bool | None = None
    inner: list[Inner] | None = Field(None, min_length=1, max_length=2)


@pytest.mark.parametrize(
    ("body", "param", "code", "says"),
    [
        ({"count": "5"}, "count", "invalid_type", "expected an integer, but got a string instead"),
        ({"count": True}, "count", "invalid_type", "expected an integer, but got a boolean instead"),
        ({"count": 1.5}, "count", "invalid_type", "expected an integer, but got a number instead"),
        ({"count": 0}, "count", "integer_below_min_value", "at least 1."),
        ({"count": 2**31}, "count", "integer_above_max_value", "at most 2147483647."),
        ({"count": 2**200}, "count", "integer_above_max_value", "more than 64 bits."),
        ({"share": 1.5}, "share", "decimal_above_max_value", "at most 1"),
        ({"share": -1}, "share", "decimal_below_min_value", "at least 0"),
        ({"share": True}, "share", "invalid_type", "expected a number, but got a boolean instead"),
        ({"yes": 1}, "yes", "invalid_type", "expected a boolean, but got an integer instead"),
        ({"yes": "true"}, "yes", "invalid_type", "expected a boolean, but got a string instead"),
        ({"inner": {}}, "inner", "invalid_type", "expected an array, but got an object instead"),
        ({"inner": []}, "inner", "empty_array", "at least 1 entry"),
        ({"inner": [{"name": "a"}] * 3}, "inner", "array_above_max_length", "at most 2 entries"),
        ({"inner": ["a"]}, "inner[0]", "invalid_type", "expected an object, but got a string instead"),
        ({"inner": [{"name": "a"}, {}]}, "inner[1].name", "missing_required_parameter", "Missing required"),
        ({"inner": [{"name": "aaaa"}]}, "inner[0].name", "string_above_max_length", "at most 3 characters"),
        ({"inner": [{"name": "A"}]}, "inner[0].name", "invalid_value", "^[a-z]*$"),
        ({"inner": [{"name": None}]}, "inner[0].name", "invalid_type", "expected a string, but got null instead"),
    ],
)
async def test_a_wrong_field_is_named_by_its_path_with_what_is_expected(
    body: dict[str, Any], param: str, code: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await read_request(json.dumps(body).encode(), Outer)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert says in caught.value.message


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "10 MB of text": ({"input": "x, " * 3_400_000}, "store"),
    "10 MB of escapes": ({"input": '\n,"' * 1_600_000}, "store"),
    "text that is too long": ({"input": "x" * 11_000_000}, "input"),
    "30,000 messages": ({"input": [user("x" * 300)] * 30_000}, "store"),
    "30,000 parts": ({"input": [user([{"type": "input_text", "text": "x" * 300}] * 30_000)]}, "store"),
    "90,000 wrong messages": ({"input": [{"role": "user"}] * 90_000}, "input[0].content"),
    "90,000 wrong parts": ({"input": [user([{"type": "x"}] * 90_000)]}, "input[0].content[0].type"),
    "200,000 messages": ({"input": [user("x")] * 200_000}, ""),
    "300,000 keys": ({"metadata": {f"{number:x}": "" for number in range(300_000)}}, ""),
    "500,000 numbers": ({"unknown": [0] * 500_000}, ""),
}


@pytest.mark.parametrize(("fields", "param"), LARGE.values(), ids=LARGE)
async def test_the_server_does_other_things_while_it_reads_a_large_body(fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "m", **fields, "store": "no"}).encode()
    loop = asyncio.get_running_loop()
    gaps: list[float] = []

    async def tick() -> None:
        last = loop.time()
        while True:
            await asyncio.sleep(0)
            now = loop.time()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    with pytest.raises(InvalidRequest) as caught:
        await read_request(body, CreateResponse)
    ticking.cancel()
    print(f"{len(body):,} bytes: longest gap {max(gaps) * 1000:.0f} ms")
    assert (caught.value.param or "") == param
    if not param:
        assert caught.value.code == "array_above_max_length"
    assert len(caught.value.message) < 1024


@pytest.mark.parametrize("text", [b"a, b", rb"\\", rb"\",", rb"\\\",", rb"\\\\", rb",\u005c"])
def test_commas_in_text_are_no_values(text: bytes) -> None:
    assert len(parse_object(b'{"a": ["%b", ",", ' % text + b"1," * 99_997 + b"1]}")["a"]) == 100_000
    with pytest.raises(InvalidRequest):
        parse_object(b'{"a": ["%b", ",", ' % text + b"1," * 99_998 + b"1]}")


async def test_large_bodies_of_a_tenant_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers hold the GIL; threads that pass it to each other would keep it from the event loop for seconds.
    One tenant's bodies delay no body of another for longer than one of them takes."""
    running, order, most = Counter[str](), list[str](), 0

    def parse(body: bytes) -> dict[str, Any]:
        nonlocal most
        fields = parse_object(body)
        running[fields["tenant"]] += 1
        most = max(most, *running.values())
        order.append(fields["tenant"])
        time.sleep(0.02)
        running[fields["tenant"]] -= 1
        return fields

    async def read(tenant: str, number: int) -> int:
        CURRENT_TURN.set(turn_of(tenant))
        fields = await read_object(json.dumps({"tenant": tenant, "a": "x" * 300_000, "b": number}).encode())
        return fields["b"]

    monkeypatch.setattr(parsing, "parse_object", parse)
    loud = [asyncio.create_task(read("loud", number)) for number in range(8)]
    await asyncio.sleep(0)
    loud[1].cancel()  # while it waits
    quiet = [asyncio.create_task(read("quiet", number)) for number in range(2)]
    assert await asyncio.gather(loud[0], *loud[2:]) == [0, *range(2, 8)]
    assert await asyncio.gather(*quiet) == [0, 1]
    assert most == 1
    assert order.index("quiet") <= 2
    with pytest.raises(InvalidRequest, match="duplicate key"):
        await read_object(b'{"a": "%b", "b": 1, "b": 2}' % (b"x" * 2_000_000))


@pytest.mark.parametrize("digits", INTEGERS)
def test_an_integer_beyond_64_bits_is_a_float_because_few_libraries_write_it(digits: bytes) -> None:
    value: Any = parse_object(b'{"a": [%b]}' % digits)["a"][0]
    assert (value, type(value)) == (INTEGERS[digits], type(INTEGERS[digits]))
    assert orjson.loads(orjson.dumps(value)) == value
