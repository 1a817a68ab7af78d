"""Images that chat messages name by URL: fetched here, under the fetcher's rules, and passed on as data. An inference
server would fetch them from inside its own network.
"""

import asyncio
import base64
from typing import Final

from apis.chat import ChatRequest, ImagePart, Message
from apis.errors import FetchFailed, InvalidRequest
from apis.fetcher import Fetcher, FetchRequest

MAX_IMAGES: Final = 50
_OK: Final = 200


async def inline_images(chat: ChatRequest, fetcher: Fetcher | None) -> ChatRequest:
    """Return the chat with its images as data. Raises InvalidRequest, which names the part, if a fetch fails."""
    places = {
        part.image_url.url: f"messages[{at}].content[{index}].image_url"
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:image/")
    }
    if not places:
        return chat
    if fetcher is None or len(places) > MAX_IMAGES:
        message = f"A request names {MAX_IMAGES} images by URL at most." if fetcher else "No images are fetched here."
        raise InvalidRequest(message, param="messages", code="invalid_value")
    urls = await asyncio.gather(*(_fetch_data_url(fetcher, url, place) for url, place in places.items()))
    data_urls = dict(zip(places, urls, strict=True))
    return chat.model_copy(update={"messages": [_replace_urls(message, data_urls) for message in chat.messages]})


async def _fetch_data_url(fetcher: Fetcher, url: str, param: str) -> str:
    try:
        answer = await fetcher.fetch(FetchRequest(url))
    except FetchFailed as exc:
        raise InvalidRequest(exc.message, param=param, code="failed_to_download_image") from exc
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if answer.status != _OK or not kind.startswith("image/"):
        message = f"There is no image at the URL (status {answer.status}, type '{kind:.64}')."
        raise InvalidRequest(message, param=param, code="failed_to_download_image")
    data = await asyncio.to_thread(base64.b64encode, answer.body)
    return f"data:{kind};base64,{data.decode()}"


def _replace_urls(message: Message, urls: dict[str, str]) -> Message:
    if not isinstance(message.content, list):
        return message
    content = [
        part.model_copy(update={"image_url": part.image_url.model_copy(update={"url": urls[part.image_url.url]})})
        if isinstance(part, ImagePart) and part.image_url.url in urls
        else part
        for part in message.content
    ]
    return message.model_copy(update={"content": content})
