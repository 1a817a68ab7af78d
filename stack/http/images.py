"""Replaces the image URLs of chat messages by data URLs of whole images, fetched by the Fetcher with its checks. An
inference server would fetch them from inside its own network.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from apis.chat import ChatRequest, ImagePart, Message
from apis.documents.fetcher import Fetcher, FetchRequest
from apis.documents.reader import UnreadableFile, image_to_url, validate_image_url
from apis.errors import FetchFailed, InvalidRequest

MAX_IMAGES: Final = 50
_OK: Final = 200


async def inline_images(chat: ChatRequest, fetcher: Fetcher | None) -> ChatRequest:
    """Return the request with its images as data URLs. Raises InvalidRequest with the place of an image that fails."""
    places = {
        part.image_url.url: f"messages[{at}].content[{index}].image_url"
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    }
    if not places:
        return chat
    replacements = await load_images(places, fetcher, "messages")
    return chat.model_copy(update={"messages": [_replace_urls(message, replacements) for message in chat.messages]})


async def load_images(places: Mapping[str, str], fetcher: Fetcher | None, param: str) -> dict[str, str]:
    """Return the data URL of each URL of an image, by whose place in the request an error names it; `param` names them
    all. Raises InvalidRequest."""
    remote_count = sum(not url.startswith("data:") for url in places)
    if remote_count and (fetcher is None or remote_count > MAX_IMAGES):
        message = f"A request names {MAX_IMAGES} images by URL at most." if fetcher else "No images are fetched here."
        raise InvalidRequest(message, param=param, code="invalid_value")
    data_urls = await asyncio.gather(*(_to_data_url(fetcher, url, place) for url, place in places.items()))
    return dict(zip(places, data_urls, strict=True))


async def _to_data_url(fetcher: Fetcher | None, url: str, param: str) -> str:
    try:
        if fetcher is None or url.startswith("data:"):
            return await asyncio.to_thread(validate_image_url, url)
        response = await fetcher.fetch(FetchRequest(url))
        if response.status != _OK:
            raise FetchFailed(f"There is no image at the URL (status {response.status}).")
        return await asyncio.to_thread(image_to_url, response.body)
    except FetchFailed as exc:
        raise InvalidRequest(exc.message, param=param, code="failed_to_download_image") from exc
    except UnreadableFile as exc:
        raise InvalidRequest(exc.message, param=param, code=exc.code) from exc


def _replace_urls(message: Message, urls: Mapping[str, str]) -> Message:
    if not isinstance(message.content, list):
        return message
    content = [replace_url(part, urls) if isinstance(part, ImagePart) else part for part in message.content]
    return message.model_copy(update={"content": content})


def replace_url(part: ImagePart, urls: Mapping[str, str]) -> ImagePart:
    """Return the image with the data URL that its URL has among these."""
    image = part.image_url
    return part.model_copy(update={"image_url": image.model_copy(update={"url": urls.get(image.url, image.url)})})
