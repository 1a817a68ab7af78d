"""A client's trace goes on to the inference server, in its valid form or not at all."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.http.tracing import read_trace
from tests.stack.http.raw import ask, connection, request
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, stream, text_chunks

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
ASKED: dict[str, Any] = {"model": "fake-model", "input": "hi"}


def read(*headers: tuple[str, str]) -> dict[str, str]:
    return dict(read_trace([(name.encode(), value.encode("latin-1")) for name, value in headers]))


@pytest.mark.parametrize(
    "parent",
    [PARENT, PARENT.replace("-01", "-ff"), PARENT.replace("00-4", "cc-4")],
)
def test_a_valid_parent_is_read(parent: str) -> None:
    assert read(("host", "x"), ("traceparent", parent)) == {"traceparent": parent}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}0",
        f"{PARENT}-00",
        f" {PARENT}",
        PARENT.replace("-", "_"),
        PARENT.replace("00-4", "ff-4"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"{PARENT}\r\nx: y",
        f"{PARENT}\n",
        "x" * 65536,
        PARENT.replace("4", "\xb2"),
    ],
)
def test_another_parent_is_none_and_takes_its_state_along(parent: str) -> None:
    assert read(("traceparent", parent), ("tracestate", STATE)) == {}


def test_two_parents_are_none() -> None:
    assert read(("traceparent", PARENT), ("traceparent", PARENT)) == {}
    assert read(("tracestate", STATE)) == {}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([STATE], STATE),
        (["a=1", "b=2"], "a=1,b=2"),
        ([" a=1 ,\t, b=2,"], "a=1,b=2"),
        (["fw529a3039@dt=FfAAAA", "0a/b*c_d-e=x y"], "fw529a3039@dt=FfAAAA,0a/b*c_d-e=x y"),
        ([",".join(f"k{n}=v" for n in range(32))], ",".join(f"k{n}=v" for n in range(32))),
    ],
)
def test_a_valid_state_comes_along(states: list[str], expected: str) -> None:
    context = read(("traceparent", PARENT), *(("tracestate", state) for state in states))
    assert context == {"traceparent": PARENT, "tracestate": expected}


@pytest.mark.parametrize(
    "state",
    [
        *("", ",", "a", "a=", "=1", "A=1", "a=1=2", "a=\x7f", "a=\xe9", "a=1\r\nx: y", "a=1\n", "a b=1", "a=1,a=2"),
        *("@a=1", "a@=1", "a@B=1", ",".join(f"k{n}=v" for n in range(33)), f"a={'x' * 511}", "a" * 257 + "=1"),
    ],
)
def test_another_state_is_left_out(state: str) -> None:
    assert read(("traceparent", PARENT), ("tracestate", state)) == {"traceparent": PARENT}


@given(st.binary(max_size=80), st.binary(max_size=600))
def test_nothing_breaks_out_of_its_line(parent: bytes, state: bytes) -> None:
    for headers in ([(b"traceparent", parent)], [(b"traceparent", PARENT.encode()), (b"tracestate", state)]):
        trace = read_trace(headers)
        assert all(value.isascii() and value.isprintable() and len(value) <= 512 for value in trace.values())


def vllm(upstream: UpstreamServer) -> dict[str, Any]:
    return {"provider": "vllm", "base_url": upstream.base_url}


def traces(upstream: UpstreamServer) -> list[tuple[str | None, str | None]]:
    return [(one.headers.get("traceparent"), one.headers.get("tracestate")) for one in upstream.chats]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True, "stream": True}])
async def test_the_inference_server_gets_the_trace_header(more: dict[str, Any]) -> None:
    headers = [("traceparent", PARENT), ("tracestate", STATE), ("baggage", "user=secret"), ("x-other", "secret")]
    async with UpstreamServer(stream(text_chunks("hi"))) as upstream, serving(vllm(upstream)) as served:
        assert (await ask(served.url, {**ASKED, **more}, headers=headers)).status == 200
        assert (await ask(served.url, {**ASKED, **more}, headers=[("traceparent", "nonsense")])).status == 200
        assert (await ask(served.url, {**ASKED, **more})).status == 200
        assert traces(upstream) == [(PARENT, STATE), (None, None), (None, None)]
        assert all("secret" not in value for one in upstream.chats for value in one.headers.values())


async def test_side_by_side_and_one_after_the_other_each_has_its_own() -> None:
    async with UpstreamServer(stream(text_chunks("hi"))) as upstream, serving(vllm(upstream)) as served:
        await asyncio.gather(*(ask(served.url, ASKED, headers=[("traceparent", one)]) for one in (PARENT, OTHER)))
        assert sorted(parent for parent, _ in traces(upstream) if parent) == sorted([PARENT, OTHER])
        await _pipelined(served)
        assert [parent for parent, _ in traces(upstream)[2:]] == [PARENT, None, OTHER]


async def _pipelined(served: Served) -> None:
    """Three requests in one go on one connection."""
    requests = [
        request(served.url, ASKED, headers=[("traceparent", one)] if one else ()) for one in (PARENT, "", OTHER)
    ]
    requests[:2] = [one.replace(b"connection: close\r\n", b"") for one in requests[:2]]
    async with connection(served.url) as (reader, writer):
        writer.write(b"".join(requests))
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 3
