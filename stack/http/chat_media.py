"""The files, audio and images of chat messages, in a form that their model takes.

A model that takes files is sent their data, any other is shown their text under their names. Audio is passed on to
models that take it. The URLs of images become data URLs of whole images, fetched by the Fetcher with its checks: an
inference server would fetch them from inside its own network.
"""

import asyncio
import base64
from collections.abc import Mapping, Set
from dataclasses import replace
from mimetypes import guess_type
from typing import Final, TypeVar

from apis.chat import AudioPart, ChatRequest, ContentPart, FileData, FilePart, ImagePart, TextPart
from apis.documents.fetcher import Fetcher, FetchRequest
from apis.documents.reader import (
    Document,
    Reader,
    UnreadableFile,
    decode_file_data,
    image_to_url,
    render_file,
    validate_image_url,
)
from apis.errors import FetchFailed, InvalidRequest, NotFound, Unsupported
from apis.inference import Inference, Modality
from providers.common.audio import require_base64_audio, require_hearing

PartT = TypeVar("PartT", AudioPart, FilePart, ImagePart)
MAX_FILES: Final = 50
MAX_IMAGES: Final = 50
MAX_TEXT_CHARS: Final = 1_000_000
"""Characters of text of all files of a request together; more is refused."""
_OK: Final = 200


def _find_parts(chat: ChatRequest, kind: type[PartT]) -> dict[tuple[int, int], PartT]:
    """Return the parts of one kind, by the indexes of their message and of themselves in it."""
    return {
        (at, index): part
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, kind)
    }


def _replace_parts(chat: ChatRequest, replacements: Mapping[tuple[int, int], ContentPart]) -> ChatRequest:
    """Return the request with other parts in the places of some."""
    messages = [*chat.messages]
    for at in dict.fromkeys(at for at, _ in replacements):
        parts = messages[at].content
        assert isinstance(parts, list)  # the part to replace is in it
        content = [replacements.get((at, index), part) for index, part in enumerate(parts)]
        messages[at] = messages[at].model_copy(update={"content": content})
    return chat.model_copy(update={"messages": messages})


async def read_files(chat: ChatRequest, inference: Inference, reader: Reader | None, tenant: str) -> ChatRequest:
    """Return the request with its files in a form that its model takes. Raises InvalidRequest with the place of a file
    that cannot be read."""
    await _check_audio(chat, inference)
    places = _find_parts(chat, FilePart)
    if not places:
        return chat
    if len(places) > MAX_FILES or reader is None:
        message = f"A request brings {MAX_FILES} files at most." if reader else "No files are read here."
        raise InvalidRequest(message, param="messages", code="invalid_value")
    takes_files = "file" in (await _find_modalities(chat, inference) or ())
    parts = await asyncio.gather(
        *(
            _read_part(part, f"messages[{at}].content[{index}].file", reader, tenant, takes_files=takes_files)
            for (at, index), part in places.items()
        )
    )
    if sum(len(part.text) for part in parts if isinstance(part, TextPart)) > MAX_TEXT_CHARS:
        message = f"The files have more than {MAX_TEXT_CHARS} characters of text."
        raise InvalidRequest(message, param="messages", code="context_length_exceeded")
    return _replace_parts(chat, dict(zip(places, parts, strict=True)))


async def _check_audio(chat: ChatRequest, inference: Inference) -> None:
    """Raise InvalidRequest for audio that is no base64, or whose model is known to take none."""
    audio = {
        f"messages[{at}].content[{index}]": part.input_audio.data
        for (at, index), part in _find_parts(chat, AudioPart).items()
    }
    if audio:
        await asyncio.to_thread(require_base64_audio, audio)
        require_hearing(await _find_modalities(chat, inference), next(iter(audio)))


async def _find_modalities(chat: ChatRequest, inference: Inference) -> Set[Modality] | None:
    """Return what the model of a chat is listed to take; None where that is unknown."""
    return next((entry.modalities for entry in await inference.models() if entry.id == chat.model), None)


async def _read_part(part: FilePart, param: str, reader: Reader, tenant: str, *, takes_files: bool) -> ContentPart:
    file = part.file
    if file.file_id is None and file.file_data is None:
        message = "A file has either file_data or file_id."
        raise InvalidRequest(message, param=f"{param}.file_data", code="missing_required_parameter")
    if takes_files and file.file_id is None:
        return part
    try:
        document = await _load_document(file, reader, tenant)
        if takes_files:
            data_url = await asyncio.to_thread(_document_to_url, document)
            return FilePart(file=FileData(file_data=data_url, filename=document.name))
        text = await reader.extract_text(document, MAX_TEXT_CHARS)
    except (UnreadableFile, NotFound, Unsupported) as exc:
        field = "file_id" if file.file_id else "file_data"
        raise InvalidRequest(exc.message, param=f"{param}.{field}", code=exc.code or "invalid_value") from exc
    return TextPart(text=render_file(" ".join(document.name.split()), text))


async def _load_document(file: FileData, reader: Reader, tenant: str) -> Document:
    if file.file_id:
        document = await reader.load_upload(file.file_id, tenant=tenant)
    else:
        document = await asyncio.to_thread(decode_file_data, file.file_data or "")
    return replace(document, name=file.filename) if file.filename else document


def _document_to_url(document: Document) -> str:
    media_type = guess_type(document.name)[0] or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(document.data).decode()}"


async def inline_images(chat: ChatRequest, fetcher: Fetcher | None) -> ChatRequest:
    """Return the request with its images as data URLs. Raises InvalidRequest with the place of an image that fails."""
    parts = _find_parts(chat, ImagePart)
    if not parts:
        return chat
    places = {part.image_url.url: f"messages[{at}].content[{index}].image_url" for (at, index), part in parts.items()}
    urls = await load_images(places, fetcher, "messages")
    return _replace_parts(chat, {place: replace_url(part, urls) for place, part in parts.items()})


async def load_images(places: Mapping[str, str], fetcher: Fetcher | None, param: str) -> dict[str, str]:
    """Return the data URL of each URL of an image, by whose place in the request an error names it; `param` names them
    all. Raises InvalidRequest."""
    remote_count = sum(not url.startswith("data:") for url in places)
    if remote_count and (fetcher is None or remote_count > MAX_IMAGES):
        message = f"A request names {MAX_IMAGES} images by URL at most." if fetcher else "No images are fetched here."
        raise InvalidRequest(message, param=param, code="invalid_value")
    data_urls = await asyncio.gather(*(_image_to_url(fetcher, url, place) for url, place in places.items()))
    return dict(zip(places, data_urls, strict=True))


async def _image_to_url(fetcher: Fetcher | None, url: str, param: str) -> str:
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


def replace_url(part: ImagePart, urls: Mapping[str, str]) -> ImagePart:
    """Return the image with the data URL that its URL has among these."""
    image = part.image_url
    return part.model_copy(update={"image_url": image.model_copy(update={"url": urls.get(image.url, image.url)})})
