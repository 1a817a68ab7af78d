"""Reads the files of chat messages as the Responses API does: a model that takes files is sent their data, any other is
shown their text under their names. Audio is passed on to models that take it.
"""

import asyncio
import base64
from dataclasses import replace
from mimetypes import guess_type
from typing import Final

from apis.chat import AudioPart, ChatRequest, ContentPart, FileData, FilePart, Message, TextPart
from apis.documents.reader import Document, Reader, UnreadableFile, decode_file_data, render_file
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.inference import Inference
from providers.common.audio import require_base64_audio, require_hearing

MAX_FILES: Final = 50
MAX_TEXT_CHARS: Final = 1_000_000
"""Characters of text of all files of a request together; more is refused."""


async def read_files(chat: ChatRequest, inference: Inference, reader: Reader | None, tenant: str) -> ChatRequest:
    """Return the request with its files in a form that its model takes. Raises InvalidRequest with the place of a file
    that cannot be read."""
    await _check_audio(chat, inference)
    places = {
        (at, index): part
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, FilePart)
    }
    if not places:
        return chat
    if len(places) > MAX_FILES or reader is None:
        message = f"A request brings {MAX_FILES} files at most." if reader else "No files are read here."
        raise InvalidRequest(message, param="messages", code="invalid_value")
    model = next((entry for entry in await inference.models() if entry.id == chat.model), None)
    takes_files = model is not None and "file" in (model.modalities or ())
    parts = await asyncio.gather(
        *(
            _read_part(part, f"messages[{at}].content[{index}].file", reader, tenant, takes_files=takes_files)
            for (at, index), part in places.items()
        )
    )
    if sum(len(part.text) for part in parts if isinstance(part, TextPart)) > MAX_TEXT_CHARS:
        message = f"The files have more than {MAX_TEXT_CHARS} characters of text."
        raise InvalidRequest(message, param="messages", code="context_length_exceeded")
    replacements = dict(zip(places, parts, strict=True))
    messages = [_replace_parts(message, at, replacements) for at, message in enumerate(chat.messages)]
    return chat.model_copy(update={"messages": messages})


async def _check_audio(chat: ChatRequest, inference: Inference) -> None:
    """Raise InvalidRequest for audio that is no base64, or whose model is known to take none."""
    audio = {
        f"messages[{at}].content[{index}]": part.input_audio.data
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, AudioPart)
    }
    if audio:
        await asyncio.to_thread(require_base64_audio, audio)
        model = next((entry for entry in await inference.models() if entry.id == chat.model), None)
        require_hearing(None if model is None else model.modalities, next(iter(audio)))


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
            data_url = await asyncio.to_thread(_to_data_url, document)
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


def _to_data_url(document: Document) -> str:
    media_type = guess_type(document.name)[0] or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(document.data).decode()}"


def _replace_parts(message: Message, at: int, replacements: dict[tuple[int, int], ContentPart]) -> Message:
    if not isinstance(message.content, list) or not any(place[0] == at for place in replacements):
        return message
    content = [replacements.get((at, index), part) for index, part in enumerate(message.content)]
    return message.model_copy(update={"content": content})
