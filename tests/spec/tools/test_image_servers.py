"""Servers of images that lie, fail, hang or are scarce: the model reads of a failed image, and the answer goes on."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from aiohttp import web

from tests.support.models.images import PNG
from tests.support.sdk.client import sdk_client
from tests.support.sdk.drawing import DONE, IMAGE_TOOL, draw, drawing, image_of
from tests.support.sdk.requests import create, messages, stream
from tests.support.servers.images_server import Handler, b64
from tests.support.servers.serving import serving
from tests.support.waiting import until

Json = dict[str, Any]
TOOL = IMAGE_TOOL


def text(body: str, status: int = 200, content_type: str = "application/json") -> Handler:
    return lambda _: web.Response(text=body, status=status, content_type=content_type)


def data(body: Any, status: int = 200) -> Handler:
    return lambda _: web.json_response(body, status=status)


def image(base64_data: Any) -> Handler:
    return data({"data": [{"b64_json": base64_data}]})


def packed(body: bytes, content_type: str = "application/json") -> Handler:
    headers = {"content-type": content_type, "content-encoding": "gzip"}
    return lambda _: web.Response(body=gzip.compress(body), headers=headers)


EVENTS = "text/event-stream"
LIES: dict[str, tuple[Handler, str]] = {
    "no JSON": (text("<html>"), "no JSON object"),
    "a list": (text("[]"), "no JSON object"),
    "no data": (text('{"data": []}'), "without an image"),
    "a number": (image(7), "without an image"),
    "no base64": (image("@@@@"), "not base64"),
    "text as an image": (image("aGVsbG8="), "no image"),
    "half an image": (image(b64(PNG[:-12])), "cut off"),
    "too large": (image(b64(PNG + b"\0" * 5000)), "more than 4096 bytes"),
    "a foreign URL": (data({"data": [{"url": "http://127.0.0.1:1/x"}]}), "could not be fetched"),
    "another encoding": (
        lambda _: web.Response(body=b"{}", headers={"content-encoding": "br"}),
        "cannot be read. The server answered in the encoding 'br'",
    ),
    "a bomb": (packed(b" " * 10_000_000), "answered with more than"),
    "no URL": (data({"data": [{"url": "http://["}]}), "images server"),
    "a refusal": (
        data({"error": {"message": "Not\nthis.", "code": "moderation_blocked"}}, 400),
        "refused the request: Not this.",
    ),
    "an error with a 200": (data({"error": {"message": "No GPU."}}), "No GPU."),
    "a wrong key": (text("{}", 401), "refused the key"),
    "too many": (text("{}", 429), "no more images just now"),
    "a crash": (text("Traceback of /home/me", 500), "failed (HTTP 500)"),
    "a redirect": (text("", 302), "HTTP 302"),
    "a stream without an end": (
        text(f'data: {{"type": "image_generation.partial_image", "b64_json": "{b64()}"}}\n\n', 200, EVENTS),
        "without an image",
    ),
    "an error in a stream": (
        text('data: {"type": "error", "error": {"message": "Out of ink."}}\n\n', 200, EVENTS),
        "Out of ink.",
    ),
}


@pytest.mark.parametrize("case", LIES.values(), ids=LIES)
async def test_a_lying_server_is_a_failed_item_that_the_model_reads(case: tuple[Handler, str]) -> None:
    answer, words = case
    async with drawing(config={"max_image_bytes": 4096}) as (served, server):
        server.answers = [answer]
        events = await stream(served, tools=[TOOL])
        report = messages(served)[-1]["content"]
    item = image_of(events[-1].response)
    assert (item.status, item.result) == ("failed", None)
    assert words in report
    assert item.error.message == report
    assert item.error.code == ("moderation_blocked" if "Not this" in words else None)
    assert "Traceback" not in report
    assert events[-1].response.output_text == "Done."


async def test_an_endless_answer_is_cut_at_its_bound() -> None:
    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with drawing(config={"max_image_bytes": 4096}) as (served, server):
        server.answers = [pour]
        response = await create(served, tools=[TOOL])
    assert "answered with more than" in image_of(response).error.message


async def test_an_image_that_a_gateway_compressed_is_read() -> None:
    answer = {"data": [{"b64_json": b64()}]}
    event = {"type": "image_generation.completed", "b64_json": b64()}
    for body, kind in ((json.dumps(answer), "application/json"), (f"data: {json.dumps(event)}\n\n", EVENTS)):
        async with drawing() as (served, server):
            server.answers = [packed(body.encode(), kind)]
            response = await create(served, tools=[TOOL])
        assert image_of(response).result == b64()


async def test_an_image_at_the_servers_own_url_is_fetched() -> None:
    async with drawing() as (served, server):
        server.answers = [lambda _: web.json_response({"data": [{"url": f"{server.url}/files/a.png"}]})]
        response = await create(served, tools=[TOOL])
    assert image_of(response).result == b64()


async def test_a_server_that_is_gone_or_too_slow_is_a_failed_item() -> None:
    async with drawing(config={"timeout_s": 0.3}) as (served, server):
        server.release.clear()
        slow = await create(served, tools=[TOOL])
        await asyncio.wait_for(server.dropped.wait(), 5)
    assert image_of(slow).error.message == "The image took longer than 0.3 s."
    more = {"image_generator": {"provider": "openai_images", "base_url": "http://127.0.0.1:9/v1"}}
    async with serving({"provider": "scripted", "turns": [[draw()], DONE]}, more=more) as served:
        assert "could not be reached" in image_of(await create(served, tools=[TOOL])).error.message


async def test_a_client_that_leaves_ends_the_work_of_the_server() -> None:
    async with drawing() as (served, server):
        server.release.clear()
        events = await create(served, tools=[TOOL], stream=True)
        async for event in events:
            if event.type == "response.image_generation_call.generating":
                break
        await asyncio.wait_for(server.reached.wait(), 5)
        await events.close()
        await asyncio.wait_for(server.dropped.wait(), 5)


async def test_places_are_shared_among_tenants() -> None:
    keys = [{"key": f"key-{name}", "tenant": name} for name in ("greedy", "modest")]
    config = {"max_concurrent": 2, "max_waiting": 2}
    async with drawing(config=config, model="Painter", server={"api_keys": keys}) as (served, server):
        server.release.clear()
        async with sdk_client(served.url, "key-greedy") as greedy, sdk_client(served.url, "key-modest") as modest:
            ask: Json = {"model": "scripted", "input": "hi", "tools": [TOOL]}
            create_all: Any = [client.responses.create for client in (greedy, greedy, greedy, modest)]
            flood: list[asyncio.Task[Any]] = [asyncio.create_task(create(**ask)) for create in create_all[:3]]
            await asyncio.wait_for(server.reached.wait(), 5)
            one: asyncio.Task[Any] = asyncio.create_task(create_all[3](**ask))
            await until(lambda: server.running >= 2)
            server.release.set()
            await asyncio.gather(one, *flood)
    assert server.most_running == 2


async def test_a_tenant_with_too_many_images_waiting_is_turned_away_in_words() -> None:
    async with drawing(config={"max_concurrent": 1, "max_waiting": 0}, model="Painter") as (served, server):
        server.release.clear()
        first = asyncio.create_task(create(served, tools=[TOOL]))
        await asyncio.wait_for(server.reached.wait(), 5)
        second = await create(served, tools=[TOOL])
        server.release.set()
        assert image_of(await first).status == "completed"
    assert "Too many images to be generated wait already" in image_of(second).error.message
