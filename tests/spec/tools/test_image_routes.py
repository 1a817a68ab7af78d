"""/v1/images/generations and /v1/images/edits over a server of images, through the official SDK."""

import asyncio
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web
from openai import APIError, APIStatusError, BadRequestError
from openai.types import ImagesResponse

from apis.accounts.project_settings import ProjectSettings
from tests.support.models.images import GIF, PNG
from tests.support.sdk.client import sdk_client
from tests.support.sdk.drawing import drawing
from tests.support.servers.images_server import USAGE, ImagesServer, b64
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import (
    CHAINED,
    ROOT,
    new_project,
    organization_of,
    stored_organization,
    usage_results,
)

Json = dict[str, Any]


def images_of(served: Served) -> Any:
    return served.client.images


def picture(name: str = "cat.png", data: bytes = PNG) -> tuple[str, BytesIO]:
    return name, BytesIO(data)


async def refused(call: Any) -> Json:
    with pytest.raises(APIStatusError) as caught:
        await call
    assert caught.value.status_code in (400, 403)
    body: Any = caught.value.body
    return body


async def test_an_image_is_generated() -> None:
    async with drawing(config={"model": "flux"}) as (served, server):
        answer: ImagesResponse = await images_of(served).generate(prompt="A cat.", size="512x512", user="u")
    (image,) = answer.data or []
    assert (image.b64_json, image.url) == (b64(), None)
    assert (answer.size, answer.quality, answer.output_format) == ("1024x1024", "low", "png"), "what the server says"
    assert answer.background is None
    assert answer.usage is not None
    assert answer.usage.to_dict() == USAGE
    assert answer.created > 1_700_000_000
    (request,) = server.received
    assert request.fields == {
        "prompt": "A cat.",
        "n": 1,
        "size": "512x512",
        "model": "flux",
        "response_format": "b64_json",
    }


async def test_several_images_are_made_one_after_the_other() -> None:
    async with drawing() as (served, server):
        server.answers = [lambda _: web.json_response({"data": [{"b64_json": b64(GIF)}]})]
        answer = await images_of(served).generate(prompt="Cats.", n=3, response_format="b64_json")
    assert [image.b64_json for image in answer.data] == [b64(GIF), b64(), b64()]
    assert answer.usage.total_tokens == 2 * USAGE["total_tokens"], "of those that were counted"
    assert server.most_running == 1


async def test_partial_images_are_streamed() -> None:
    async with drawing() as (served, server):
        events = [
            event
            async for event in await images_of(served).generate(
                prompt="A cat.", stream=True, partial_images=2, background="opaque"
            )
        ]
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:-1]] == [0, 1]
    assert {event.b64_json for event in events} == {b64()}
    assert (events[0].background, events[0].quality, events[0].size) == ("opaque", "auto", "auto")
    assert (events[-1].quality, events[-1].size) == ("low", "512x512")
    assert events[-1].usage.to_dict() == USAGE
    assert server.received[0].fields["partial_images"] == 2


async def test_a_server_that_does_not_stream_has_its_image_in_one_event() -> None:
    async with drawing(config={"streams": False}) as (served, _):
        events = [event async for event in await images_of(served).generate(prompt="A cat.", stream=True)]
    assert [(event.type, event.b64_json) for event in events] == [("image_generation.completed", b64())]


async def test_images_are_edited_with_a_mask() -> None:
    async with drawing() as (served, server):
        answer = await images_of(served).edit(
            image=[picture(), picture("dog.gif", GIF)],
            mask=picture("mask.png"),
            prompt="Both, with hats.",
            input_fidelity="high",
            output_compression=50,
            n=1,
        )
    assert [image.b64_json for image in answer.data] == [b64(GIF)]
    (request,) = server.received
    assert request.path == "/v1/images/edits"
    assert request.files == [("image[]", PNG, "image/png"), ("image[]", GIF, "image/gif"), ("mask", PNG, "image/png")]
    assert (request.fields["input_fidelity"], request.fields["output_compression"]) == ("high", "50")


async def test_an_edit_is_streamed() -> None:
    async with drawing() as (served, _):
        stream = await images_of(served).edit(image=picture(), prompt="A hat.", stream=True, partial_images=1)
        events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert events[-1].output_format == "gif"


REFUSED: dict[str, tuple[Json, Json, str]] = {
    "a setting": ({"options": ["size"]}, {"quality": "low"}, "quality"),
    "partial images": ({"streams": False}, {"stream": True, "partial_images": 1}, "partial_images"),
    "partial images without a stream": ({}, {"partial_images": 1}, "partial_images"),
    "a stream of several": ({}, {"stream": True, "n": 2}, "n"),
    "eleven images": ({}, {"n": 11}, "n"),
    "a model": ({"models": ["flux"]}, {"model": "gpt-image-1"}, "model"),
    "a URL": ({}, {"response_format": "url"}, "response_format"),
    "an SVG": ({}, {"output_format": "svg"}, "output_format"),
    "an author of an SVG": ({}, {"svg": {"model": "m"}}, "svg"),
    "a style": ({}, {"style": "vivid"}, "style"),
    "a retired quality": ({}, {"quality": "hd"}, "quality"),
    "a size in words": ({}, {"size": "big"}, "size"),
    "no prompt": ({}, {"prompt": ""}, "prompt"),
    "a long prompt": ({}, {"prompt": "x" * 32_001}, "prompt"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_made_is_refused_by_its_field(case: tuple[Json, Json, str]) -> None:
    config, fields, param = case
    async with drawing(config=config) as (served, server):
        images = images_of(served)
        assert (await refused(images.generate(**{"prompt": "A cat.", **fields})))["param"] == param
        if param != "style":  # which only new images have
            assert (await refused(images.edit(**{"prompt": "A cat.", "image": picture(), **fields})))["param"] == param
        assert not server.received


EDITS: dict[str, tuple[Json, Callable[[], Json], str]] = {
    "edits": ({"edits": False}, lambda: {"image": picture()}, "image"),
    "no image": ({}, lambda: {"image": picture(data=b"hello")}, "image"),
    "half an image": ({}, lambda: {"image": picture(data=PNG[:-12])}, "image"),
    "a large image": ({"max_image_bytes": 1024}, lambda: {"image": picture(data=PNG + bytes(1024))}, "image"),
    "the second of two": ({}, lambda: {"image": [picture(), picture(data=b"GIF89a")]}, "image[1]"),
    "seventeen images": ({}, lambda: {"image": [picture()] * 17}, "image"),
    "a mask that is no image": ({}, lambda: {"image": picture(), "mask": picture(data=b"x")}, "mask"),
    "markup": ({}, lambda: {"image": picture(), "markup": picture()}, "markup"),
    "words as a number": ({}, lambda: {"image": picture(), "n": "two"}, "n"),
}


@pytest.mark.parametrize("case", EDITS.values(), ids=EDITS)
async def test_an_edit_that_cannot_be_made_is_refused_by_its_field(case: tuple[Json, Callable[[], Json], str]) -> None:
    config, fields, param = case
    async with drawing(config=config) as (served, server):
        assert (await refused(images_of(served).edit(prompt="A hat.", **fields())))["param"] == param
        assert not server.received


async def test_a_form_without_an_image_is_refused() -> None:
    form: Any = {"files": [("mask", ("mask.png", PNG))], "body": {"prompt": "A hat."}}
    options: Any = {"headers": {"Content-Type": "multipart/form-data"}}
    async with drawing() as (served, _):
        with pytest.raises(BadRequestError) as missing:
            await served.client.post("/images/edits", cast_to=object, options=options, **form)
    assert missing.value.param == "image"


async def test_the_servers_own_refusal_is_an_error_of_the_request() -> None:
    def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Not this.", "code": "moderation_blocked"}}, status=400)

    async with drawing() as (served, server):
        server.answers = [refuse, lambda _: web.Response(status=500), lambda _: web.json_response({"data": []})]
        error = await refused(images_of(served).generate(prompt="A cat."))
        assert error["code"] == "moderation_blocked"
        assert error["message"].endswith("Not this.")
        for _ in range(2):
            with pytest.raises(APIStatusError) as caught:
                await images_of(served).generate(prompt="A cat.")
            assert caught.value.status_code == 502
            assert "x-should-retry" not in caught.value.response.headers


async def test_an_error_after_an_image_was_made_is_not_to_be_tried_again() -> None:
    async with drawing() as (served, server):
        image = {"data": [{"b64_json": b64()}]}
        server.answers = [lambda _: web.json_response(image), lambda _: web.Response(status=500)]
        with pytest.raises(APIStatusError) as caught:
            await images_of(served).generate(prompt="A cat.", n=2)
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = f'{{"type": "image_generation.partial_image", "b64_json": "{b64()}"}}'
        await response.write(f"data: {event}\n\n".encode())
        return response

    async with drawing() as (served, server):
        server.answers = [break_off]
        events = await images_of(served).generate(prompt="A cat.", stream=True, partial_images=1)
        assert (await anext(events)).type == "image_generation.partial_image"
        with pytest.raises(APIError, match="ended its answer without an image"):
            await anext(events)


async def test_a_client_that_leaves_ends_the_work_of_the_server() -> None:
    async with drawing() as (served, server):
        server.release.clear()
        for fields in ({}, {"stream": True}):
            server.reached.clear()
            server.dropped.clear()
            asking = asyncio.create_task(images_of(served).generate(prompt="A cat.", **fields))
            await asyncio.wait_for(server.reached.wait(), 5)
            asking.cancel()
            await asyncio.wait_for(server.dropped.wait(), 5)


async def test_without_an_image_generator_the_routes_say_what_is_missing() -> None:
    async with serving() as served:
        for call in (
            images_of(served).generate(prompt="A cat."),
            images_of(served).edit(prompt="A hat.", image=picture()),
        ):
            error = await refused(call)
            assert error["code"] == "not_configured"
            assert "image_generator" in error["message"]


async def test_images_are_counted_and_closed_by_project() -> None:
    async with ImagesServer().listening() as server:
        more = {**CHAINED, "image_generator": server.config(model="flux")}
        async with serving(more=more, server={"api_keys": [ROOT]}) as served:
            organization = organization_of(served.client)
            project, key = await new_project(organization)
            async with sdk_client(served.url, key) as client:
                images: Any = client.images
                await images.generate(prompt="A cat.", n=2)
                assert [event async for event in await images.generate(prompt="A cat.", stream=True)]
                await images.edit(prompt="A hat.", image=picture())
            page = await organization.usage.images(start_time=since(), project_ids=[project], group_by=["model"])
            (result,) = usage_results(page)
            assert (result.images, result.num_model_requests, result.model) == (4, 3, "flux")
            assert usage_results(await organization.usage.completions(start_time=since(), project_ids=[project])) == []
            received = len(server.received)
            for code, settings in CLOSED.items():
                other, other_key = await new_project(organization)
                settings_store = stored_organization(served.stack.accounts).settings
                await settings_store.change_settings(other, lambda _, new=settings: new, {})
                async with sdk_client(served.url, other_key) as client:
                    for call in (
                        client.images.generate(prompt="A cat."),
                        client.images.edit(prompt="A hat.", image=picture()),
                    ):
                        assert (await refused(call))["code"] == code
            assert len(server.received) == received


CLOSED = {
    "model_not_allowed": ProjectSettings(model_mode="allow_list", model_ids=("scripted",)),
    "tool_not_allowed": ProjectSettings(disabled_tools=("image_generation",)),
}


def since() -> int:
    return int(time.time()) // 86_400 * 86_400
