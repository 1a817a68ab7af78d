"""Forms: requests of `multipart/form-data`, with the files that they bring."""

import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from apis.errors import InvalidRequest, Overloaded
from stack.http.context import get_context, get_services
from stack.http.parsing import ModelT, to_invalid_request
from stack.http.request_body import stream_body
from stack.http.unknown_fields import refuse_misspelt_field

_log = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 256 * 1024
_MAX_FORM_BYTES: Final = 256 * 1024
"""Bytes of a form's other parts, on top of its files: a prompt is the longest of them."""
_MAX_FORM_FIELDS: Final = 32
_NESTED_FIELD: Final = re.compile(r"(\w{1,32})\[(\w{1,32})\]")
_MAX_PART_HEAD_BYTES: Final = 1024
"""Bytes that the boundary and headers of one of several files may take."""


FormFields = dict[str, str | list[str]]


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded file as a stream of bytes, and the form's other fields."""

    filename: str
    fields: dict[str, str]
    data: AsyncGenerator[bytes]


@dataclass(frozen=True, slots=True)
class Form:
    """The files of a form by their field, in their order, and its other fields. Files `name[]` are files `name`, and
    fields `name[]` the entries of a list."""

    files: dict[str, list[UploadFile]]
    fields: FormFields


@asynccontextmanager
async def open_upload(
    http: Request, max_file_bytes: int, setting: str | None = "files.max_file_bytes", *, field: str = "file"
) -> AsyncGenerator[Upload]:
    """Open the form of an upload, on disk if it is large, for as long as the context lasts. `setting` is the limit's
    name in the run config, `field` the file's name in the form. Raises InvalidRequest, PayloadTooLarge, Overloaded."""
    form = await _parse_form(http, _stream_upload(http, max_file_bytes + _MAX_FORM_BYTES, setting), max_files=1)
    try:
        file = form.get(field)
        if not isinstance(file, UploadFile):
            raise _missing_file(field)
        fields = {key: value for key, value in form.multi_items() if isinstance(value, str)}
        yield Upload(file.filename or "", fields, _read_chunks(file))
    finally:
        await form.close()


@asynccontextmanager
async def open_form(http: Request, max_bytes: int, max_files: int, *, field: str) -> AsyncGenerator[Form]:
    """Open a form of several files, on disk where they are large, for as long as the context lasts; `field` is the one
    that it must have. Raises as `open_upload` does."""
    form_bytes = _MAX_FORM_BYTES + max_files * _MAX_PART_HEAD_BYTES
    parsed = await _parse_form(http, _stream_upload(http, max_bytes + form_bytes, None), max_files=max_files)
    try:
        form = Form({}, {})
        for name, value in parsed.multi_items():
            if isinstance(value, UploadFile):
                form.files.setdefault(name.removesuffix("[]"), []).append(value)
            else:
                _add_field(form.fields, name, value)
        if field not in form.files:
            raise _missing_file(field)
        yield form
    finally:
        await parsed.close()


def _add_field(fields: FormFields, name: str, value: str) -> None:
    if not name.endswith("[]"):
        fields[name] = value
        return
    entries = fields.setdefault(name.removesuffix("[]"), [])
    if isinstance(entries, list):
        entries.append(value)


def read_form_fields(fields: Mapping[str, str | list[str]], model: type[ModelT]) -> ModelT:
    """Return the fields of a form as one of our models: its numbers and booleans are text, and a field of an object is
    `name[field]`. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if nested := _NESTED_FIELD.fullmatch(name):
            inner = values.setdefault(nested[1], {})
            if isinstance(inner, dict):
                inner[nested[2]] = value
        else:
            values[name] = value
    try:
        request = model.model_validate(values, strict=False)
    except ValidationError as exc:
        raise to_invalid_request(exc.errors(include_url=False)[0], values) from None
    refuse_misspelt_field(values, request)
    return request


async def _stream_upload(http: Request, max_bytes: int, setting: str | None) -> AsyncGenerator[bytes]:
    """Yield the chunks of an upload once its tenant has room for them among the temporary files. Raises
    PayloadTooLarge and Overloaded."""
    context, shares = get_context(http.scope), get_services(http.scope).shares
    if max_bytes > shares.max_upload_bytes:
        max_bytes, setting = shares.max_upload_bytes, "server.max_uploads_bytes"
    size_bytes = 0
    async with aclosing(stream_body(http, max_bytes, setting)) as chunks:
        async for chunk in chunks:
            size_bytes += len(chunk)
            shares.cover_upload(context.places, size_bytes, context.tenant, max_bytes=max_bytes)
            yield chunk


async def _parse_form(http: Request, body: AsyncGenerator[bytes], *, max_files: int) -> FormData:
    parser = MultiPartParser(
        http.headers, body, max_files=max_files, max_fields=_MAX_FORM_FIELDS, max_part_size=_MAX_FORM_BYTES
    )
    try:
        return await parser.parse()
    except (MultiPartException, KeyError):
        # A KeyError says that the boundary is missing.
        raise InvalidRequest("We could not parse the form of your request.") from None
    except OSError as exc:
        _log.error("an upload found no room for its temporary file: %s", exc.strerror)
        raise Overloaded("The server has no room for this file now. Try again later.", retry_after_s=5) from exc


def _missing_file(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{field}'. Send it as a file, with a filename.",
        param=field,
        code="missing_required_parameter",
    )


async def _read_chunks(file: UploadFile) -> AsyncGenerator[bytes]:
    while chunk := await file.read(_CHUNK_BYTES):
        yield chunk
