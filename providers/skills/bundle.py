"""Reads the ZIP archive of a skill, which a stranger has made: nothing in it is believed, and nothing is extracted."""

import io
import re
import stat
import zipfile
import zlib
from itertools import takewhile
from typing import Any, Final, cast

import yaml

from apis.skills.bundle import SkillBundle, SkillFile

MAX_BUNDLE_BYTES: Final = 8 * 1024 * 1024
"""Largest archive, and largest sum of its files."""
MAX_FILES: Final = 200
_MAX_ENTRIES: Final = 1000
"""Entries of an archive, folders and ignored files among them."""
_MAX_PATH_BYTES: Final = 255
_MAX_DEPTH: Final = 16
_MAX_FRONT_MATTER_CHARS: Final = 16 * 1024
_MAX_FIELD_CHARS: Final = 2048
_END_SIGNATURE: Final = b"PK\x05\x06"
_ENTRY_SIGNATURE: Final = b"PK\x01\x02"
_MAX_END_BYTES: Final = 22 + 65535
_MAX_NAME_CHARS: Final = 64
_MAX_DESCRIPTION_CHARS: Final = 1024
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IS_ENCRYPTED: Final = 0x1
_NAME: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_INSTRUCTIONS: Final = "SKILL.md"
_FRONT_MATTER: Final = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)


class InvalidBundle(Exception):
    """An archive that is no skill. The text is a sentence that says why."""


def read_bundle(data: bytes) -> SkillBundle:
    """Return the skill in an archive. Blocks; raise InvalidBundle."""
    if len(data) > MAX_BUNDLE_BYTES:
        raise InvalidBundle(f"The archive is larger than {MAX_BUNDLE_BYTES >> 20} MiB.")
    if _count_entries(data) > _MAX_ENTRIES:
        raise InvalidBundle(f"The archive has more than {_MAX_ENTRIES} entries.")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            files = _read_files(archive, [entry for entry in entries if not _is_ignored(entry.filename)])
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as exc:
        raise InvalidBundle(f"The archive cannot be read: {exc}."[:300]) from exc
    return build_bundle(files)


def build_bundle(files: list[SkillFile]) -> SkillBundle:
    """Return the skill that these files are, below one folder or none. Raise InvalidBundle."""
    if not files:
        raise InvalidBundle("The archive has no files.")
    roots = {file.path.partition("/")[0] for file in files}
    if not any(file.path == _INSTRUCTIONS for file in files) and len(roots) == 1:
        prefix = f"{roots.pop()}/"
        if all(file.path.startswith(prefix) for file in files):
            files = [SkillFile(file.path.removeprefix(prefix), file.data, file.is_executable) for file in files]
    instructions = next((file for file in files if file.path == _INSTRUCTIONS), None)
    if instructions is None:
        raise InvalidBundle(f"The archive has no {_INSTRUCTIONS} in its one folder.")
    name, description = (_read_front_matter(instructions.data, each) for each in ("name", "description"))
    if len(name) > _MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise InvalidBundle(
            f"The name in {_INSTRUCTIONS} must be lower-case letters, digits and single hyphens, 64 characters at most."
        )
    if len(description) > _MAX_DESCRIPTION_CHARS:
        raise InvalidBundle(f"The description in {_INSTRUCTIONS} is longer than {_MAX_DESCRIPTION_CHARS} characters.")
    return SkillBundle(name, description, files)


def _read_files(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> list[SkillFile]:
    files: dict[str, SkillFile] = {}
    available_bytes = MAX_BUNDLE_BYTES
    for entry in entries:
        mode = entry.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise InvalidBundle(f"'{_printable_name(entry)}' is no regular file: links and devices are not allowed.")
        if entry.is_dir():
            continue
        _check_path(entry)
        if entry.filename in files:
            raise InvalidBundle(f"The archive has '{_printable_name(entry)}' twice.")
        if len(files) == MAX_FILES:
            raise InvalidBundle(f"The archive has more than {MAX_FILES} files.")
        if entry.flag_bits & _IS_ENCRYPTED or entry.compress_type not in _METHODS:
            raise InvalidBundle(
                f"'{_printable_name(entry)}' is encrypted, or compressed by another method than deflate."
            )
        with archive.open(entry) as file:
            # the entry's own size is not believed: one byte more than there is room for is read at most
            data = file.read(available_bytes + 1)
        available_bytes -= len(data)
        if available_bytes < 0:
            raise InvalidBundle(f"The files are larger than {MAX_BUNDLE_BYTES >> 20} MiB together.")
        files[entry.filename] = SkillFile(entry.filename, data, is_executable=bool(mode & stat.S_IXUSR))
    folders = {path[: match.start()] for path in files for match in re.finditer("/", path)}
    if clash := folders & files.keys():
        raise InvalidBundle(f"'{min(clash)}' is a file and a folder.")
    return list(files.values())


def _check_path(entry: zipfile.ZipInfo) -> None:
    path = entry.orig_filename
    steps = path.split("/")
    is_legal = path.isprintable() and "\\" not in path and len(path.encode(errors="replace")) <= _MAX_PATH_BYTES
    if path != entry.filename or not is_legal or any(step in ("", ".", "..") for step in steps):
        raise InvalidBundle(f"'{_printable_name(entry)}' is no path within the skill's folder.")
    if len(steps) > _MAX_DEPTH:
        raise InvalidBundle(f"'{_printable_name(entry)}' is more than {_MAX_DEPTH} folders deep.")


def _is_ignored(path: str) -> bool:
    """Return whether this is what macOS adds to every archive."""
    return path.startswith("__MACOSX/") or path.rpartition("/")[2] == ".DS_Store"


def _printable_name(entry: zipfile.ZipInfo) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in entry.orig_filename[:100])


def _count_entries(data: bytes) -> int:
    """Return how many entries the directory at the end of an archive has, without reading them."""
    end = data.rfind(_END_SIGNATURE, -_MAX_END_BYTES)
    directory_bytes = int.from_bytes(data[end + 12 : end + 16], "little")
    return data.count(_ENTRY_SIGNATURE, max(0, end - directory_bytes), end) if end >= 0 else 0


def _read_front_matter(data: bytes, name: str) -> str:
    """Return a text at the beginning of SKILL.md, between two lines of `---`. Its other fields are not looked at: the
    parser of YAML takes a second for lists that are made for that."""
    text = data[: 4 * _MAX_FRONT_MATTER_CHARS].decode(errors="replace").removeprefix("\ufeff").replace("\r\n", "\n")
    match = _FRONT_MATTER.match(text[:_MAX_FRONT_MATTER_CHARS])
    if match is None:
        raise InvalidBundle(f"{_INSTRUCTIONS} does not begin with front matter, YAML between two lines of `---`.")
    value: Any = None
    lines = iter(match[1].split("\n"))
    for line in lines:
        if line.startswith(f"{name}:"):
            rest = takewhile(lambda each: not each or each.startswith((" ", "\t")), lines)
            field = "\n".join([line, *rest])
            if len(field) > _MAX_FIELD_CHARS:
                raise InvalidBundle(f"The {name} in {_INSTRUCTIONS} is longer than {_MAX_FIELD_CHARS} characters.")
            # a list, a mapping, a tag and a reference are no text, and only they take time
            if not field.removeprefix(f"{name}:").lstrip().startswith(("[", "{", "!", "&", "*", "-", "?")):
                value = _load_field(field, name)
            break
    value = " ".join(value.split()) if isinstance(value, str) else ""
    if not value or not value.isprintable():
        raise InvalidBundle(f"The front matter of {_INSTRUCTIONS} must have a `{name}`, a text that is not empty.")
    return value


def _load_field(field: str, name: str) -> Any:
    try:
        fields: Any = yaml.safe_load(field)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise InvalidBundle(f"The front matter of {_INSTRUCTIONS} is not YAML.") from exc
    return cast(dict[str, Any], fields).get(name) if isinstance(fields, dict) else None
