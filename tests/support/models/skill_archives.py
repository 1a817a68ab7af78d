"""Archives of skills."""

import base64
import io
import zipfile
from typing import Any

FRONT_MATTER = "---\nname: greeting\ndescription: Greets people.\n---\nRun greet.sh.\n"


def pack(*entries: tuple[str | zipfile.ZipInfo, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A ZIP archive of these entries, in this order, repeated names included; the same bytes at any time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries:
            if isinstance(name, zipfile.ZipInfo):
                archive.writestr(name, data)
            else:
                archive.writestr(entry(name, 0o600), data, method)
    return buffer.getvalue()


def entry(name: str, mode: int) -> zipfile.ZipInfo:
    """An entry with the mode of a file of UNIX."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def inline(data: bytes, name: str = "greeting") -> dict[str, Any]:
    """The skill as a request brings it."""
    source = {"type": "base64", "media_type": "application/zip", "data": base64.b64encode(data).decode()}
    return {"type": "inline", "name": name, "description": "Greets people.", "source": source}
