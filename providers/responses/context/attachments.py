"""Attachments: the files and images in a conversation's items, as content parts that its model can read.

A model that accepts files gets the file, any other its text under its name. Images always become data URLs: a remote
URL is fetched here and nowhere else, and the file is stored with the turn that named it. Files of a request must be
readable; for an unreadable file of an earlier turn the model gets a note.
"""

import asyncio
import base64
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from mimetypes import guess_type
from typing import Final

from apis.chat import ContentPart, FileData, FilePart, ImagePart, ImageUrl, TextPart
from apis.documents.reader import (
    Document,
    Reader,
    UnreadableFile,
    decode_file_data,
    image_to_url,
    relabel_image_url,
    render_file,
    validate_image_url,
)
from apis.errors import FetchFailed, InvalidRequest, NotFound, StackError, Unsupported
from apis.inference import Modality
from apis.responses import CreateResponse
from apis.wire.image_tools import ImageGenerationTool
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.tool_items import ImageGenerationCallItem
from providers.common.audio import require_base64_audio, require_hearing
from providers.responses.context.replay import image_data_url
from providers.responses.events.citations import one_line
from providers.responses.item_index import ItemIndex
from providers.responses.store.url_files import (
    AttachedPart,
    attach_fetched_file,
    audio_parts,
    decode_fetched_file,
    file_parts,
    replace_parts,
)
from providers.responses.tools.input_tools import collect_additional_tools
from providers.responses.tools.models import ModelCatalog

MAX_FILES: Final = 50
"""Files that one request may bring; inline images do not count."""
MAX_TEXT_CHARS: Final = 1_000_000
"""Characters of text of one file, and of all files of a conversation together; more is refused."""
_MAX_CACHED_CHARS: Final = 16_000_000
"""Characters of extracted text that stay in memory for later turns."""
_MAX_FETCHED_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all files that a request names by URL; more is refused."""
_FILE_ERRORS: Final = (InvalidRequest, Unsupported, NotFound, FetchFailed)


class Attachments:
    """Reads the files of conversations with one Reader; extracted texts stay in a cache for later turns."""

    def __init__(self, reader: Reader, model_catalog: ModelCatalog) -> None:
        self._reader = reader
        self._model_catalog = model_catalog
        self._text_cache: OrderedDict[bytes, str] = OrderedDict()
        self._cached_chars = 0

    async def read_files(
        self, request: CreateResponse, index: ItemIndex, *, tenant: str
    ) -> Mapping[AttachedPart, ContentPart]:
        """Return the files and images of the items as the model reads them. Those that the input names by URL are put
        into the parts that name them. Raises InvalidRequest, naming the part, for a file of the request that cannot be
        read."""
        positions = index.file_positions()
        if not positions:
            return {}
        await self._check_audio(request, index)
        locations = _part_locations(index)
        earlier = [part for at in positions if at < index.input_start for part, _ in file_parts(index.items[at])]
        if not locations and not earlier:
            return {}
        if sum(isinstance(part, InputFile) or not _is_inline(part) for part in locations) > MAX_FILES:
            raise InvalidRequest(f"A request brings {MAX_FILES} files at most.", param="input", code="invalid_value")
        modalities = (await self._model_catalog.find(request.model)).modalities
        for part, location in locations.items() if modalities is not None and "image" not in modalities else ():
            if isinstance(part, InputImage):
                raise InvalidRequest("This model takes no images.", param=location, code="invalid_image")
        await self._fetch_url_files(index, locations)
        locations = _part_locations(index)
        parts = [*dict.fromkeys((*locations, *earlier))]
        chat_parts = await asyncio.gather(
            *(self._part_to_chat(part, locations.get(part), modalities, tenant) for part in parts)
        )
        if sum(len(part.text) for part in chat_parts if isinstance(part, TextPart)) > MAX_TEXT_CHARS:
            message = (
                f"The files have more than {MAX_TEXT_CHARS} characters of text: search in them with `file_search`."
            )
            raise InvalidRequest(message, param="input", code="context_length_exceeded")
        return dict(zip(parts, chat_parts, strict=True))

    async def _check_audio(self, request: CreateResponse, index: ItemIndex) -> None:
        """Raise InvalidRequest for audio of the request that is no base64, or whose model hears none."""
        audio = {
            f"{index.param(position)}.{location}": part.input_audio.data
            for position in index.file_positions()
            if position >= index.input_start
            for part, location in audio_parts(index.items[position])
        }
        if audio:
            await asyncio.to_thread(require_base64_audio, audio)
            require_hearing((await self._model_catalog.find(request.model)).modalities, next(iter(audio)))

    async def sees_generated_images(self, request: CreateResponse, index: ItemIndex) -> bool:
        """Return whether the model sees the images that image models generate. Raises InvalidRequest for an item of the
        request that should hold one and does not."""
        tools = (*(request.tools or ()), *collect_additional_tools(index))
        if not (index.has(ImageGenerationCallItem) or any(isinstance(tool, ImageGenerationTool) for tool in tools)):
            return False
        if "image" not in ((await self._model_catalog.find(request.model)).modalities or ()):
            return False
        for position in index.positions(ImageGenerationCallItem):
            item = index.items[position]
            if position >= index.input_start and isinstance(item, ImageGenerationCallItem) and item.result:
                try:
                    await asyncio.to_thread(validate_image_url, image_data_url(item.result))
                except UnreadableFile as exc:
                    param = f"{index.param(position)}.result"
                    raise InvalidRequest(exc.message, param=param, code=exc.code) from exc
        return True

    async def _fetch_url_files(self, index: ItemIndex, locations: Mapping[AttachedPart, str]) -> None:
        """Put the files that the input names by URL into the parts that name them."""
        remote = {
            part: location
            for part, location in locations.items()
            if _remote_url(part) and decode_fetched_file(part) is None
        }
        if not remote:
            return
        fetched = await asyncio.gather(*(self._fetch_file(part, location) for part, location in remote.items()))
        documents = dict(zip(remote, fetched, strict=True))
        if sum(len(document.data) for document in fetched) > _MAX_FETCHED_BYTES:
            message = f"The files at URLs have more than {_MAX_FETCHED_BYTES} bytes together."
            raise InvalidRequest(message, param="input", code="invalid_value")
        replacements = await asyncio.to_thread(
            lambda: {part: attach_fetched_file(part, document) for part, document in documents.items()}
        )
        for position in index.file_positions():
            if position >= index.input_start:
                index.replace(position, replace_parts(index.items[position], replacements))

    async def _fetch_file(self, part: AttachedPart, location: str) -> Document:
        try:
            return await self._reader.fetch_file(_remote_url(part))
        except _FILE_ERRORS as exc:
            raise _invalid_part(exc, part, location) from exc

    async def _part_to_chat(
        self, part: AttachedPart, location: str | None, modalities: frozenset[Modality] | None, tenant: str
    ) -> ContentPart:
        try:
            if isinstance(part, InputImage):
                if modalities is not None and "image" not in modalities:
                    return TextPart(text="[An image of an earlier turn, which this model cannot see.]")
                url = await self._image_to_url(part, tenant, should_validate=location is not None)
                return ImagePart(image_url=ImageUrl(url=url, detail=part.detail))
            document = await self._load_document(part, tenant)
            if "file" in (modalities or ()):
                data = await asyncio.to_thread(_data_url, document)
                return FilePart(file=FileData(file_data=data, filename=document.name or None))
            return TextPart(text=render_file(one_line(document.name), await self._extract_text(document, tenant)))
        except _FILE_ERRORS as exc:
            if location is None:
                name = one_line(getattr(part, "filename", None) or part.file_id or "of an earlier turn")
                return TextPart(text=f"[The file {name} cannot be read any more.]")
            raise _invalid_part(exc, part, location) from exc

    async def _image_to_url(self, part: InputImage, tenant: str, *, should_validate: bool) -> str:
        """Return the image as a data URL; an inline one is decoded only where `should_validate`."""
        if _is_inline(part):
            url = part.image_url or ""
            return await asyncio.to_thread(validate_image_url, url) if should_validate else relabel_image_url(url)
        document = await self._load_referenced_file(part, tenant)
        return await asyncio.to_thread(image_to_url, document.data)

    async def _load_document(self, part: InputFile, tenant: str) -> Document:
        if _is_inline(part):
            document = await asyncio.to_thread(decode_file_data, part.file_data or "")
        else:
            document = await self._load_referenced_file(part, tenant)
        return replace(document, name=part.filename) if part.filename else document

    async def _load_referenced_file(self, part: AttachedPart, tenant: str) -> Document:
        if part.file_id:
            return await self._reader.load_upload(part.file_id, tenant=tenant)
        return await asyncio.to_thread(decode_fetched_file, part) or await self._reader.fetch_file(_remote_url(part))

    async def _extract_text(self, document: Document, tenant: str) -> str:
        """Return the text of a file. The cache key holds the tenant: response times show nothing about others."""
        key = await asyncio.to_thread(_text_cache_key, document, tenant)
        text = self._text_cache.pop(key, None)
        if text is None:
            text = await self._reader.extract_text(document, MAX_TEXT_CHARS, tenant=tenant)
            if key not in self._text_cache:  # two requests may have read it at the same time
                self._cached_chars += len(text)
        self._text_cache[key] = text
        while self._cached_chars > _MAX_CACHED_CHARS:
            self._cached_chars -= len(self._text_cache.popitem(last=False)[1])
        return text


def _part_locations(index: ItemIndex) -> dict[AttachedPart, str]:
    """Return the files and images of the request's own items, with their locations in the request."""
    return {
        part: f"{index.param(position)}.{location}"
        for position in index.file_positions()
        if position >= index.input_start
        for part, location in file_parts(index.items[position])
    }


def _remote_url(part: AttachedPart) -> str:
    """Return the URL to fetch the part from; empty for a part without one."""
    if isinstance(part, InputFile):
        return part.file_url or ""
    return "" if part.image_url is None or part.image_url.startswith("data:") else part.image_url


def _is_inline(part: AttachedPart) -> bool:
    """Return whether the part holds its own data."""
    return not part.file_id and not _remote_url(part)


def _invalid_part(exc: StackError, part: AttachedPart, location: str) -> InvalidRequest:
    if part.file_id:
        field, code = "file_id", "invalid_value"
    elif isinstance(part, InputImage):
        field, code = "image_url", "failed_to_download_image"
    else:
        field, code = "file_url" if part.file_url else "file_data", "invalid_value"
    return InvalidRequest(exc.message, param=f"{location}.{field}", code=exc.code or code)


def _data_url(document: Document) -> str:
    media_type = guess_type(document.name)[0] or (
        "application/pdf" if document.data.startswith(b"%PDF-") else "text/plain"
    )
    return f"data:{media_type};base64,{base64.b64encode(document.data).decode()}"


def _text_cache_key(document: Document, tenant: str) -> bytes:
    head = f"{len(tenant)}:{tenant}{len(document.name)}:{document.name}"
    return hashlib.sha256(head.encode("utf-8", "surrogatepass") + document.data).digest()
