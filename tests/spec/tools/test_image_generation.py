"""Images that the model has generated and edited by a server of images, through the official SDKs."""

from typing import Any

import pytest
from agents import ImageGenerationTool
from aiohttp import web

from tests.support.models.images import GIF, JPEG, PIXEL_URL, PNG, image_url
from tests.support.sdk.agents_sdk import RUNS, Run, agent, kinds
from tests.support.sdk.conversations import conversations
from tests.support.sdk.drawing import DONE, IMAGE_TOOL, draw, drawing, image_of
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.images_server import USAGE, b64
from tests.support.servers.serving import serving

Json = dict[str, Any]
TOOL = IMAGE_TOOL
USER: Json = {"role": "user", "content": "Draw a cat."}


async def test_an_image_is_generated_and_the_model_goes_on() -> None:
    async with drawing() as (served, server):
        events = await stream(served, tools=[TOOL])
        _, called, output = messages(served)
        (offered,) = chat_requests(served)[0].tools or []
    response = events[-1].response
    item = image_of(response)
    assert item.to_dict() == {
        "id": item.id,
        "type": "image_generation_call",
        "status": "completed",
        "result": b64(),
        "action": "generate",
        "output_format": "png",
        "quality": "low",
        "size": "1024x1024",
        "revised_prompt": "A cat.",
    }
    assert response.output_text == "Done."
    names = [event.type for event in events if "image_generation" in event.type]
    assert names == [f"response.image_generation_call.{name}" for name in ("in_progress", "generating", "completed")]
    (received,) = server.received
    assert received.fields == {"prompt": "A cat.", "n": 1, "response_format": "b64_json"}
    assert received.key == "Bearer k-images"
    assert called["tool_calls"][0]["function"]["arguments"] == '{"prompt": "A cat."}'
    assert output["content"][0]["text"].endswith(f"Its id is {item.id}.")
    assert output["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL_URL}}
    assert response.tool_usage.image_gen.to_dict() == {
        key: USAGE[key] for key in ("input_tokens", "input_tokens_details", "output_tokens", "total_tokens")
    }
    assert sorted(offered.model_dump()["function"]["parameters"]["properties"]) == ["images", "prompt"]


async def test_partial_images_are_streamed() -> None:
    async with drawing() as (served, server):
        events = await stream(served, tools=[{**TOOL, "partial_images": 2}])
    partial = [event for event in events if event.type == "response.image_generation_call.partial_image"]
    assert [(event.partial_image_index, event.partial_image_b64, event.output_format) for event in partial] == [
        (0, b64(), "png"),
        (1, b64(), "png"),
    ]
    assert image_of(events[-1].response).result == b64()
    assert events[-1].response.tool_usage.image_gen.total_tokens == USAGE["total_tokens"]
    assert (server.received[0].fields["stream"], server.received[0].fields["partial_images"]) == (True, 2)


async def test_a_server_that_does_not_stream_is_accepted() -> None:
    async with drawing() as (served, server):
        server.answers = [lambda _: web.json_response({"data": [{"b64_json": b64(JPEG)}]})]
        item = image_of(await create(served, tools=[{**TOOL, "partial_images": 3, "output_format": "png"}]))
    assert (item.result, item.output_format) == (b64(JPEG), "jpeg")  # what it is, not what was asked for


OPTIONS: Json = {
    "background": "transparent",
    "complexity": "low",
    "moderation": "low",
    "output_compression": 50,
    "output_format": "webp",
    "quality": "high",
    "size": "1536x1024",
}


async def test_the_fields_of_the_tool_reach_the_server() -> None:
    async with drawing(config={"model": "flux"}) as (served, server):
        response = await create(served, tools=[{**TOOL, **OPTIONS, "input_fidelity": "high", "model": "other"}])
        await create(served, input="again", tools=[TOOL])
    assert server.received[0].fields == {
        "prompt": "A cat.",
        "n": 1,
        "response_format": "b64_json",
        "model": "other",
        **OPTIONS,
    }
    assert response.tools[0].to_dict() == {**TOOL, **OPTIONS, "input_fidelity": "high", "model": "other"}
    assert image_of(response).background == "transparent"


REFUSED: dict[str, tuple[Json, Json, str]] = {
    "an option": ({"options": ["size"]}, {"quality": "low"}, "tools[0].quality"),
    "partial images": ({"streams": False}, {"partial_images": 1}, "tools[0].partial_images"),
    "an edit": ({"edits": False}, {"action": "edit"}, "tools[0].action"),
    "a mask": ({"edits": False}, {"input_image_mask": {"image_url": PIXEL_URL}}, "tools[0].input_image_mask"),
    "a model": ({"models": ["flux"]}, {"model": "gpt-image-1"}, "tools[0].model"),
    "an unknown mask": ({}, {"input_image_mask": {"file_id": "file-none"}}, "tools[0].input_image_mask.file_id"),
    "a mask that is no image": (
        {},
        {"input_image_mask": {"image_url": "data:image/png;base64,aGk="}},
        "tools[0].input_image_mask.image_url",
    ),
    "an empty mask": ({}, {"input_image_mask": {}}, "tools[0].input_image_mask"),
    "four partial images": ({}, {"partial_images": 4}, "tools[0].partial_images"),
    "a size in words": ({}, {"size": "big"}, "tools[0].size"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_what_the_server_has_not_is_refused_by_name(case: tuple[Json, Json, str]) -> None:
    config, fields, param = case
    async with drawing(config=config) as (served, server):
        assert (await refusal(served, tools=[{**TOOL, **fields}]))["param"] == param
        assert not server.received


async def test_values_that_leave_the_choice_to_the_server_are_taken_by_every_server() -> None:
    auto = {"background": "auto", "quality": "auto", "size": "auto", "moderation": "auto", "action": "auto"}
    async with drawing(config={"options": [], "streams": False, "edits": False}) as (served, server):
        await create(served, tools=[{**TOOL, **auto, "partial_images": 0}])
        (offered,) = chat_requests(served)[0].tools or []
    assert server.received[0].fields == {"prompt": "A cat.", "n": 1, "response_format": "b64_json"}
    assert [*offered.model_dump()["function"]["parameters"]["properties"]] == ["prompt"]


async def test_without_a_provider_the_tool_is_refused() -> None:
    async with serving({"provider": "scripted"}) as served:
        error = await refusal(served, tools=[TOOL])
    assert error["param"] == "tools[0].type"
    assert "image_generator" in error["message"]


@pytest.mark.parametrize("how", ["chained", "sent back", "by its id alone", "referred to", "in a conversation"])
async def test_a_later_turn_edits_the_image(how: str) -> None:
    async with drawing([draw()], DONE, [draw("With a hat.", "ID", call_id="c2")], DONE) as (served, server):
        fields: Json = {"tools": [TOOL]}
        if how == "in a conversation":
            fields["conversation"] = (await conversations(served).create()).id
        first = await create(served, **fields, input=[USER])
        image = image_of(first)
        ask: Json = {"role": "user", "content": "Give it a hat."}
        match how:
            case "chained":
                fields |= {"input": [ask], "previous_response_id": first.id}
            case "sent back":
                fields |= {"input": [USER, *first.output, ask]}
            case "by its id alone":
                fields |= {"input": [USER, {"type": "image_generation_call", "id": image.id}, ask]}
            case "referred to":
                references = [{"type": "item_reference", "id": item.id} for item in first.output]
                fields |= {"input": [USER, *references, ask]}
            case _:
                fields |= {"input": [ask]}
        second = await create(served, **fields)
    edited = image_of(second)
    assert (edited.action, edited.output_format, edited.result) == ("edit", "gif", b64(GIF))
    assert server.received[1].path == "/v1/images/edits"
    assert server.received[1].files == [("image[]", PNG, "image/png")]
    assert server.received[1].fields == {"prompt": "With a hat.", "n": "1", "response_format": "b64_json"}


async def test_an_image_is_edited_within_one_response_and_the_newest_one_by_that_name() -> None:
    turns = [[draw()], [draw("A hat.", "ID", call_id="c2")], [draw("Red.", "newest", call_id="c3")], DONE]
    async with drawing(*turns) as (served, server):
        response = await create(served, tools=[TOOL])
    assert [item.action for item in response.output[:-1]] == ["generate", "edit", "edit"]
    assert [each.files for each in server.received] == [
        [],
        [("image[]", PNG, "image/png")],
        [("image[]", GIF, "image/gif")],
    ]


async def test_images_of_the_input_are_edited_by_their_numbers_with_a_mask() -> None:
    async with drawing([draw("Both.", "input_2", "input_1")], DONE) as (served, server):
        uploads = [await served.client.files.create(file=(f"{at}.png", PNG), purpose="vision") for at in range(2)]
        images = [
            {"type": "input_image", "file_id": uploads[0].id},
            {"type": "input_image", "image_url": image_url(JPEG, "image/jpeg")},
        ]
        tool = {**TOOL, "action": "edit", "input_fidelity": "high", "input_image_mask": {"file_id": uploads[1].id}}
        await create(served, tools=[tool], input=[{"role": "user", "content": images}])
    (received,) = server.received
    assert received.files == [
        ("image[]", JPEG, "image/jpeg"),
        ("image[]", PNG, "image/png"),
        ("mask", PNG, "image/png"),
    ]
    assert received.fields["input_fidelity"] == "high"


async def test_a_demanded_edit_takes_the_newest_image_where_the_model_names_none() -> None:
    async with drawing(config={"image_field": "image"}) as (served, server):
        content = [{"type": "input_image", "image_url": PIXEL_URL}]
        await create(served, tools=[{**TOOL, "action": "edit"}], input=[{"role": "user", "content": content}])
        assert server.received[0].files == [("image", PNG, "image/png")]
        nothing = await create(served, tools=[{**TOOL, "action": "edit"}])
        assert image_of(nothing).status == "failed"
        assert "no image to edit" in messages(served)[-1]["content"]


async def test_a_wrong_name_is_reported_to_the_model_with_those_there_are() -> None:
    async with drawing([draw("x", "ig_none")], DONE) as (served, server):
        content = [{"type": "input_image", "image_url": PIXEL_URL}]
        response = await create(served, tools=[TOOL], input=[{"role": "user", "content": content}])
        report = messages(served)[-1]["content"]
    assert image_of(response).status == "failed"
    assert report == "There is no image 'ig_none'. The images of this conversation: input_1."
    assert not server.received


async def test_a_model_whose_eyes_are_not_known_reads_of_the_image_only() -> None:
    async with drawing(model="scripted") as (served, _):
        response = await create(served, tools=[TOOL])
        output = messages(served)[-1]["content"]
    assert output == f"The image was generated, and the user sees it. Its id is {image_of(response).id}."


async def test_a_history_of_another_server_is_read_by_a_model_that_sees() -> None:
    image = {
        "type": "image_generation_call",
        "id": "ig_1",
        "status": "completed",
        "result": b64(),
        "revised_prompt": "A cat.",
    }
    failed = {"type": "image_generation_call", "id": "ig_2", "status": "failed", "result": None}
    async with serving({"provider": "tests.support.sdk.drawing:Seeing"}) as served:
        await create(served, input=[USER, image, failed, {"role": "user", "content": "?"}])
        _, called, first, second, _ = messages(served)
        assert len(called["tool_calls"]) == 2
        assert first["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL_URL}}
        assert second["content"] == "The image could not be generated."
        error = await refusal(served, input=[USER, {**image, "result": "aGk="}])
        assert error["param"] == "input[1].result"
        unknown = {"type": "image_generation_call", "id": "ig_3"}
        assert (await refusal(served, 404, input=[USER, unknown]))["param"] == "input[1].id"


async def test_it_can_be_demanded() -> None:
    async with drawing() as (served, _):
        response = await create(served, tools=[TOOL], tool_choice=TOOL)
        chosen: Any = chat_requests(served)[0].tool_choice
    assert (chosen.name, response.tool_choice.type) == ("image_generation", "image_generation")
    assert response.output_text == "Done."


async def test_it_is_stored_as_it_was_streamed_and_runs_in_the_background() -> None:
    async with drawing() as (served, _):
        async with responses(served).stream(model="scripted", input="hi", tools=[TOOL]) as events:
            final = await events.get_final_response()
        assert bare(await responses(served).retrieve(final.id)) == bare(final)
        tool = {**TOOL, "partial_images": 1}
        events = await stream(served, tools=[tool], background=True)
        response = events[-1].response
        assert image_of(response).result == b64()
        assert response.tool_usage.image_gen.total_tokens == USAGE["total_tokens"]
        again = [event async for event in await responses(served).retrieve(response.id, stream=True)]
    assert [bare(event) for event in again] == [bare(event) for event in events]


@pytest.mark.parametrize("run", RUNS)
async def test_the_agents_sdk_shows_the_image(run: Run) -> None:
    async with drawing([draw()], DONE, DONE) as (served, _):
        who = agent(served, tools=[ImageGenerationTool({"type": "image_generation", "quality": "low"})])
        result = await run(who)
        assert kinds(result) == ["tool_call_item", "message_output_item"]
        raw: Any = result.new_items[0].raw_item
        assert raw.result == b64()
        again = await run(who, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
        output = messages(served)[2]
    assert output["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL_URL}}
    assert again.final_output == "Done."
