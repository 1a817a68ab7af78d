"""The files that a conversation's items bring along, as its model is to be told them.

A model that takes files is given the file, any other its text under its name. Images are always given as data: what a
URL names is fetched here and nowhere else, and kept with the turn that named it. What a request itself brings has to be
readable; a file of an earlier turn may be gone by now, and then the model is told so.
"""

import asyncio
import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from mimetypes import guess_type
from typing import Final

from apis.chat import FileData, FilePart, ImagePart, ImageUrl, Part, TextPart
from apis.errors import FetchFailed, InvalidRequest, NotFound, StackError, Unsupported
from apis.inference import Modality
from apis.reader import Document, Reader, Unreadable
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.items import CustomToolCallOutput, FunctionCallOutput, GivenMessage, Item
from providers.responses.context.conversation import Conversation
from providers.responses.context.url_files import Attached, fetched, with_fetched, with_parts
from providers.responses.tools.models import Natives
from providers.responses.tools.web_search.pages import one_line

MAX_FILES: Final = 50
MAX_CHARS: Final = 1_000_000
"""Of the text of one file, and of all files of a conversation together."""
_MAX_CHARS_KEPT: Final = 16_000_000
_MAX_FETCHED_BYTES: Final = 16 * 1024 * 1024
"""Of the files that a request names by URL, together."""
_IMAGES: Final = ((b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))
_REFUSED: Final = (InvalidRequest, Unsupported, NotFound, FetchFailed)


class Attachments:
    """Over one Reader. Texts that were read are kept for later turns, as far as there is room."""

    def __init__(self, reader: Reader, natives: Natives) -> None:
        self._reader = reader
        self._natives = natives
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    async def read(self, conversation: Conversation, model: str, *, tenant: str) -> Conversation:
        """The conversation with its files read. Raises InvalidRequest, naming the place, for a file of the request
        that cannot be."""
        places = _places(conversation)
        earlier = [part for item in conversation.past.items for part, _ in _parts(item, 0)]
        if not places and not earlier:
            return conversation
        if sum(isinstance(part, InputFile) or not _is_data(part) for part in places) > MAX_FILES:
            raise InvalidRequest(f"A request brings {MAX_FILES} files at most.", param="input", code="invalid_value")
        takes = await self._natives.modalities(model)
        for part, place in places.items() if takes is not None and "image" not in takes else ():
            if isinstance(part, InputImage):
                raise InvalidRequest("This model takes no images.", param=place, code="invalid_image")
        conversation = await self._fetch(conversation, places)
        places = _places(conversation)
        parts = [*dict.fromkeys((*places, *earlier))]
        read = await asyncio.gather(*(self._part(part, places.get(part), takes, tenant) for part in parts))
        if sum(len(part.text) for part in read if isinstance(part, TextPart)) > MAX_CHARS:
            message = f"The files have more than {MAX_CHARS} characters of text: search in them with `file_search`."
            raise InvalidRequest(message, param="input", code="context_length_exceeded")
        return replace(conversation, attached=dict(zip(parts, read, strict=True)))

    async def _fetch(self, conversation: Conversation, places: Mapping[Attached, str]) -> Conversation:
        """The conversation with the files that its request names by URL."""
        named = {part: place for part, place in places.items() if _url(part) and fetched(part) is None}
        if not named:
            return conversation
        found = dict(zip(named, await asyncio.gather(*(self._fetched(*each) for each in named.items())), strict=True))
        if sum(len(document.data) for document in found.values()) > _MAX_FETCHED_BYTES:
            message = f"The files at URLs have more than {_MAX_FETCHED_BYTES} bytes together."
            raise InvalidRequest(message, param="input", code="invalid_value")
        kept = await asyncio.to_thread(lambda: {part: with_fetched(part, found[part]) for part in found})
        return replace(conversation, given=[with_parts(item, kept) for item in conversation.given])

    async def _fetched(self, part: Attached, place: str) -> Document:
        try:
            return await self._reader.fetched(_url(part))
        except _REFUSED as exc:
            raise _refused(exc, part, place) from exc

    async def _part(self, part: Attached, place: str | None, takes: frozenset[Modality] | None, tenant: str) -> Part:
        try:
            if isinstance(part, InputImage):
                if takes is not None and "image" not in takes:
                    return TextPart(text="[An image of an earlier turn, which this model cannot see.]")
                url = await self._image(part, tenant, check=place is not None)
                return ImagePart(image_url=ImageUrl(url=url, detail=part.detail))
            document = await self._document(part, tenant)
            if "file" in (takes or ()):
                data = await asyncio.to_thread(_data_url, document)
                return FilePart(file=FileData(file_data=data, filename=document.name or None))
            return TextPart(text=_told(document.name, await self._text(document, tenant)))
        except _REFUSED as exc:
            if place is None:
                name = one_line(getattr(part, "filename", None) or part.file_id or "of an earlier turn")
                return TextPart(text=f"[The file {name} cannot be read any more.]")
            raise _refused(exc, part, place) from exc

    async def _image(self, part: InputImage, tenant: str, *, check: bool) -> str:
        """Its data URL; one that came as such is only looked at where that is asked for."""
        if _is_data(part):
            if check:
                await asyncio.to_thread(_decoded_image, part.image_url or "")
            return part.image_url or ""
        document = await self._elsewhere(part, tenant)
        return await asyncio.to_thread(_image_url, document)

    async def _document(self, part: InputFile, tenant: str) -> Document:
        if _is_data(part):
            document = await asyncio.to_thread(_decoded, part.file_data or "")
        else:
            document = await self._elsewhere(part, tenant)
        return replace(document, name=part.filename) if part.filename else document

    async def _elsewhere(self, part: Attached, tenant: str) -> Document:
        if part.file_id:
            return await self._reader.uploaded(part.file_id, tenant=tenant)
        return await asyncio.to_thread(fetched, part) or await self._reader.fetched(_url(part))

    async def _text(self, document: Document, tenant: str) -> str:
        """The keys are a tenant's: how fast one is answered tells nothing of what another has."""
        key = await asyncio.to_thread(_key, document, tenant)
        text = self._texts.pop(key, None)
        if text is None:
            text = await self._reader.text(document, MAX_CHARS)
            if key not in self._texts:  # two may have read it side by side
                self._chars += len(text)
        self._texts[key] = text
        while self._chars > _MAX_CHARS_KEPT:
            self._chars -= len(self._texts.popitem(last=False)[1])
        return text


def _places(conversation: Conversation) -> dict[Attached, str]:
    """The parts of the request's own items that have to be read, and where they are."""
    return {part: place for at, item in enumerate(conversation.given) for part, place in _parts(item, at)}


def _url(part: Attached) -> str:
    """Where it is to be fetched from; empty where it is not."""
    if isinstance(part, InputFile):
        return part.file_url or ""
    return "" if part.image_url is None or part.image_url.startswith("data:") else part.image_url


def _is_data(part: Attached) -> bool:
    """Whether the part brings all of itself."""
    return not part.file_id and not _url(part)


def _refused(exc: StackError, part: Attached, place: str) -> InvalidRequest:
    if part.file_id:
        field, code = "file_id", "invalid_value"
    elif isinstance(part, InputImage):
        field, code = "image_url", "failed_to_download_image"
    else:
        field, code = "file_url" if part.file_url else "file_data", "invalid_value"
    return InvalidRequest(exc.message, param=f"{place}.{field}", code=exc.code or code)


def _parts(item: Item, at: int) -> Iterator[tuple[Attached, str]]:
    """The item's parts that have to be read, and their places in the request."""
    match item:
        case GivenMessage(content=list() as parts):
            field, found = "content", parts
        case FunctionCallOutput(output=list() as parts) | CustomToolCallOutput(output=list() as parts):
            field, found = "output", parts
        case _:
            return
    for index, part in enumerate(found):
        if isinstance(part, InputFile | InputImage):
            yield part, f"input[{at}].{field}[{index}]"


def _told(name: str, text: str) -> str:
    return f'<file name="{one_line(name).replace(chr(34), chr(39))}">\n{text}\n</file>'


def _decoded(file_data: str) -> Document:
    head, comma, rest = file_data.partition(",")
    if head.startswith("data:") and not (comma and head.endswith(";base64")):
        raise Unreadable("invalid_file", "File data is base64, or a data URL like data:TYPE;base64,DATA.")
    try:
        data = base64.b64decode(rest if head.startswith("data:") else file_data, validate=True)
    except (binascii.Error, ValueError):
        raise Unreadable("invalid_file", "The file's data is not base64.") from None
    return Document("file", data)


def _decoded_image(url: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise Unreadable("invalid_base64_image", "The image's data is not base64.") from None


def _data_url(document: Document) -> str:
    kind = guess_type(document.name)[0] or ("application/pdf" if document.data.startswith(b"%PDF-") else "text/plain")
    return f"data:{kind};base64,{base64.b64encode(document.data).decode()}"


def _image_url(document: Document) -> str:
    kind = next((name for begins, name in _IMAGES if document.data.startswith(begins)), None)
    if document.data[:4] == b"RIFF" and document.data[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise Unreadable("unsupported_file", "The file is no image: PNG, JPEG, GIF and WebP are taken.")
    return f"data:image/{kind};base64,{base64.b64encode(document.data).decode()}"


def _key(document: Document, tenant: str) -> bytes:
    head = f"{len(tenant)}:{tenant}{len(document.name)}:{document.name}"
    return hashlib.sha256(head.encode("utf-8", "surrogatepass") + document.data).digest()
