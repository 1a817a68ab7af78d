"""Archives of skills: those of requests in base64, and those that are packed of uploaded files."""

import base64
import binascii
import io
import stat
import zipfile
from collections.abc import Sequence
from typing import Final

from apis.errors import InvalidRequest
from apis.skills.bundle import SkillBundle, SkillFile
from apis.wire.tools import InlineSkill
from providers.skills.bundle import MAX_FILES, InvalidBundle, read_bundle

_ARCHIVE_START: Final = b"PK"
_SCRIPT_START: Final = b"#!"
_FIRST_TIME: Final = (1980, 1, 1, 0, 0, 0)


def read_inline(skill: InlineSkill, param: str) -> SkillBundle:
    """Return the skill that a request brings; `param` is the name of its data. Blocks. Raises InvalidRequest."""
    try:
        return read_bundle(base64.b64decode(skill.source.data, validate=True))
    except binascii.Error:
        raise InvalidRequest("The archive is not base64.", param=param, code="invalid_value") from None
    except InvalidBundle as exc:
        raise InvalidRequest(str(exc), param=param, code="invalid_value") from exc


def read_files(files: Sequence[SkillFile]) -> tuple[bytes, SkillBundle]:
    """Return the archive of a skill that was uploaded as one archive or as files, and the skill. Blocks. Raises
    InvalidRequest with the param `files`."""
    try:
        archive = files[0].data if len(files) == 1 and files[0].data.startswith(_ARCHIVE_START) else _pack(files)
        return archive, read_bundle(archive)
    except InvalidBundle as exc:
        raise InvalidRequest(str(exc), param="files", code="invalid_value") from exc


def _pack(files: Sequence[SkillFile]) -> bytes:
    """Return an archive of the files. Forms carry no permissions: a file with the first line of a script is one."""
    if len(files) > MAX_FILES:
        raise InvalidBundle(f"The skill has more than {MAX_FILES} files.")
    if len({file.path for file in files}) < len(files):
        raise InvalidBundle("Two of the files have the same path.")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.path, _FIRST_TIME)
            mode = 0o755 if file.is_executable or file.data.startswith(_SCRIPT_START) else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.data)
    return buffer.getvalue()
