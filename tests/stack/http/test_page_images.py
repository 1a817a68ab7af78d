"""Pictures of the pages of a PDF over HTTP: of a stored file of one's own, and of one that the request brings."""

import base64
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.support.models import documents
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import serving

KEYS = [{"key": f"sk-{tenant}", "tenant": tenant} for tenant in ("red", "blue")]


async def draw(client: AsyncOpenAI, path: str, **params: int) -> Any:
    return await client.get(path, cast_to=object, options={"params": params})


async def test_pages_are_drawn_for_those_who_may_read_the_file() -> None:
    more = {"files": {"provider": "kv"}, "reader": {"provider": "child"}}
    pdf = documents.pdf("One.", "Two.", "Three.")
    async with serving(more=more, server={"api_keys": KEYS}) as served:
        red = served.client
        file = await red.files.create(file=("a.pdf", pdf), purpose="assistants")
        text = await red.files.create(file=("a.txt", b"Hi"), purpose="assistants")
        path = f"/files/{file.id}/page_images"
        answer = await draw(red, path, first=2, count=4, width=102)
        assert (answer["object"], answer["page_count"]) == ("list", 3)
        assert [(each["page"], each["width"], each["height"]) for each in answer["data"]] == [
            (2, 102, 132),
            (3, 102, 132),
        ]
        head, _, data = answer["data"][0]["image_url"].partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
        with pytest.raises(BadRequestError, match="no PDF"):
            await draw(red, f"/files/{text.id}/page_images")
        with pytest.raises(BadRequestError, match="count"):
            await draw(red, path, count=5)
        async with sdk_client(served.url, "sk-blue") as blue:
            with pytest.raises(NotFoundError):
                await draw(blue, path)
        sent = {"file_data": f"data:application/pdf;base64,{base64.b64encode(pdf).decode()}", "first": 3}
        drawn: Any = await red.post("/stack/page_images", body=sent, cast_to=object)
        assert [each["page"] for each in drawn["data"]] == [3]
        with pytest.raises(BadRequestError, match="base64"):
            await red.post("/stack/page_images", body={"file_data": "%"}, cast_to=object)
