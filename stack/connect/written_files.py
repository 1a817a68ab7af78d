"""Files that `stack connect` writes, with the backups and the record by which it undoes that, byte for byte."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from apis.errors import ConfigError

_MAX_HASHES: Final = 8


class _File(BaseModel):
    """A file that was written. `hashes` are those of our texts, the newest last; `backup` is a copy of the file that
    was there before, None if there was none."""

    path: Path
    backup: Path | None
    hashes: list[str]

    def is_ours(self) -> bool:
        """Return true unless the file has changed since: it is one of our texts, or as it was before."""
        current = _hash_file(self.path)
        return current in (None, *self.hashes) or (self.backup is not None and current == _hash_file(self.backup))


class _Record(BaseModel):
    """The files written for one client. `folders` were made for it, the outermost first."""

    files: list[_File] = []
    folders: list[Path] = []


class WrittenFiles:
    """The files of one client. Each step is recorded before it is taken, so that a killed command can be undone."""

    def __init__(self, client: str) -> None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._client = client
        self._folder = Path(state) / "responses-stack" / "connect"
        self._record_path = self._folder / f"{client}.json"

    def write(self, texts: Mapping[Path, str]) -> list[str]:
        """Write the texts and return a line about each. Raises ConfigError, and then has changed no file of the client
        where one of them was edited by hand."""
        texts = {Path(os.path.realpath(path)): text for path, text in texts.items()}
        new_folders = _make_folder(self._folder)
        with self._lock():
            record = self._load_record()
            record.folders += new_folders
            self._refuse_edited([file for file in record.files if file.path in texts])
            backups = [self._add_file(record, path, text) for path, text in texts.items()]
            for path in texts:
                record.folders += _find_missing(path.parent)
                self._save(record)
                _make_folder(path.parent)
            for path, text in texts.items():
                _replace(path, text.encode())
        return [
            f"Wrote {path}" + (f"; the file that was there is {backup}" if backup else "")
            for path, backup in zip(texts, backups, strict=True)
        ]

    def restore(self) -> list[str]:
        """Bring back the files as they were before the first `write`, and return a line about each. Raises
        ConfigError, and then has changed nothing where a file was edited by hand."""
        with self._lock():
            record = self._load_record()
            if not record.files:
                raise self._build_missing_error()
            self._refuse_edited(record.files)
            lines = [_restore_file(file) for file in record.files]
            _remove(self._record_path)
            for file in record.files:
                if file.backup is not None:
                    _remove(file.backup)
        for folder in (*reversed(record.folders), self._folder, self._folder.parent):
            with suppress(OSError):  # others have files there by now
                folder.rmdir()
        return [line for line in lines if line]

    @contextmanager
    def _lock(self) -> Generator[None]:
        """Keep other commands out, for as long as the context is entered."""
        try:
            descriptor = os.open(self._folder, os.O_RDONLY)
        except FileNotFoundError:
            raise self._build_missing_error() from None
        except OSError as exc:
            raise _build_error(self._folder, exc) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _build_missing_error(self) -> ConfigError:
        return ConfigError(
            f"Nothing to restore: `stack connect {self._client} --write` has written no file on this machine."
        )

    def _load_record(self) -> _Record:
        try:
            return _Record.model_validate_json(self._record_path.read_bytes())
        except FileNotFoundError:
            return _Record()
        except (OSError, ValidationError) as exc:
            raise ConfigError(
                f"{self._record_path} cannot be read, so it is unknown which files were written. The copies of earlier "
                f"files are in {self._folder}: put them back by hand, then remove that record."
            ) from exc

    def _refuse_edited(self, files: Sequence[_File]) -> None:
        edited = [str(file.path) for file in files if not file.is_ours()]
        if edited:
            raise ConfigError(
                f"{', '.join(edited)}: edited after `stack connect` wrote it, and left as it is. Keep your edits under "
                f"another name and run this again: mv {edited[0]} {edited[0]}.mine"
            )

    def _add_file(self, record: _Record, path: Path, text: str) -> Path | None:
        """Record what is about to be written; returns the backup, which is made the first time."""
        file = next((file for file in record.files if file.path == path), None)
        if file is None:
            backup = self._folder / f"{self._client}.{len(record.files)}.backup" if path.exists() else None
            if backup is not None:
                _copy(path, backup)
            file = _File(path=path, backup=backup, hashes=[])
            record.files.append(file)
        file.hashes = [*file.hashes[1 - _MAX_HASHES :], hashlib.sha256(text.encode()).hexdigest()]
        self._save(record)
        return file.backup

    def _save(self, record: _Record) -> None:
        _replace(self._record_path, json.dumps(record.model_dump(mode="json"), indent=2).encode())


def _restore_file(file: _File) -> str | None:
    """Bring back one file as it was; returns a line about it, None if there is nothing to do."""
    if file.backup is not None:
        _make_folder(file.path.parent)
        _copy(file.backup, file.path)
        return f"Restored {file.path}"
    if not file.path.exists():
        return None
    _remove(file.path)
    return f"Removed {file.path}"


def _find_missing(folder: Path) -> list[Path]:
    """Return the folders that are not there on the way to this one, the outermost first."""
    return [each for each in (*reversed(folder.parents), folder) if not each.exists()]


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder that only its owner can enter; returns those that were made. Raises ConfigError."""
    missing = _find_missing(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise _build_error(folder, exc) from exc
    return missing


def _hash_file(path: Path) -> str | None:
    """Return the hash of the file's bytes; None if there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _build_error(path, exc) from exc


def _replace(path: Path, content: bytes) -> None:
    """Write the whole file or nothing. Only its owner can read it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise _build_error(path, exc) from exc


def _copy(source: Path, path: Path) -> None:
    """Copy a file with its permissions and times, whole or not at all."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            shutil.copy2(source, name)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise _build_error(path, exc) from exc


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise _build_error(path, exc) from exc


def _build_error(path: Path, exc: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: {exc.strerror or exc}. Make it writable for you, or run this without --write and put the lines in "
        "place yourself."
    )
