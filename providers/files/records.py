"""The records of files in the KVStore, which all providers of files share.

TENANT/file/FILE              the metadata of a file; present where the file is whole
TENANT/file_usage             the number and the bytes of the tenant's files; may include expired ones
TENANT/file_piece/FILE/N      the bytes of a file, where they are in the store itself
~file_loose/TENANT/BLOB       the guard of bytes that are being written (`providers/common/state/blobs.py`)
"""

import re
from pathlib import PurePosixPath
from typing import Final

import msgspec
from openai.types.file_object import FileObject

from apis.errors import NotFound

PENDING_PREFIX: Final = "~file_loose/"
"""No tenant's name begins with a tilde, so these keys are no tenant's."""
FILE_ID: Final = re.compile(r"file-[0-9a-f]{44}")

_MAX_NAME_CHARS: Final = 255
_UNSAFE_CHARS: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


class UploadRecord(msgspec.Struct, omit_defaults=True):
    """The metadata of a file; `created_at` and `expires_at` are seconds since the epoch. `object_store` is the id of
    the object store that has the bytes; empty where they are in the KVStore."""

    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float | None = None
    object_store: str = ""


class TenantUsage(msgspec.Struct):
    """The number of a tenant's files and the sum of their sizes in bytes."""

    files: int = 0
    size: int = 0


def clean_filename(filename: str) -> str:
    """Return the label of a file without path, control and direction characters."""
    clean = _UNSAFE_CHARS.sub("", filename[:4096]).replace("\\", "/")
    return PurePosixPath(clean).name.strip()[-_MAX_NAME_CHARS:] or "file"


def record_to_file(file_id: str, record: UploadRecord) -> FileObject:
    """Return the file as clients see it."""
    fields = {
        "id": file_id,
        "object": "file",
        "bytes": record.size,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
    # the SDK's object lacks a purpose that its own uploads may have, `evals`
    file = FileObject.model_validate({**fields, "purpose": "user_data"})
    return file.model_copy(update={"purpose": record.purpose})


def record_key(tenant: str, file_id: str) -> str:
    """Return the key of a file's record; with an empty id, the prefix of all of the tenant's."""
    return f"{tenant}/file/{file_id}"


def chunk_prefix(tenant: str, file_id: str) -> str:
    """Return the prefix of the keys of a file's chunks in the KVStore."""
    return f"{tenant}/file_piece/{file_id}/"


def usage_key(tenant: str) -> str:
    """Return the key of the tenant's usage."""
    return f"{tenant}/file_usage"


def pending_key(tenant: str, blob_id: str) -> str:
    """Return the key of the guard of bytes that are being written."""
    return f"{PENDING_PREFIX}{tenant}/{blob_id}"


def file_not_found(file_id: str) -> NotFound:
    """Return the error of an id that no file of the tenant has."""
    match = FILE_ID.search(file_id)
    return NotFound(f"No such File object: {match[0] if match else 'the id is not one of a file'}.", param="id")
