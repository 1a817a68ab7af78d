"""Objects: a folder of an object store (S3, Google Cloud Storage, Azure, a file system), with our errors and retries.

The library retries what the store answers with a 5xx or a 429, broken connections and reads that ran into a time-out.
Here the rest is repeated: answers that break off, and writes whose outcome is unknown.
"""

import asyncio
import logging
import os
import random
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from apis.errors import ConfigError, StoreUnavailable
from providers.files.object_config import ObjectStoreConfig

if TYPE_CHECKING:  # it is a type of the package's stubs alone
    from obstore import ObjectMeta

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")
_ATTEMPTS: Final = 3
"""Attempts at one operation, each with the retries of the library."""
_MAX_PAUSE_S: Final = 0.5
_LIST_PAGE: Final = 1000
_CUT_WRITE: Final = re.compile(r"(.+)#[0-9]+")


class ObjectStoreRefused(StoreUnavailable):
    """The object store does not let this server in, or has no such bucket: to try again does not help."""


class StoredObject(NamedTuple):
    """An object of a listing: its name in the folder, and the time of its write in seconds since the epoch."""

    name: str
    modified_at: float


class Objects:
    """The objects below one URL. All methods raise StoreUnavailable, ObjectStoreRefused where it is for good, and
    ConfigError where the environment lacks something, such as the name of an account."""

    def __init__(self, config: ObjectStoreConfig) -> None:
        self._config = config

    @cached_property
    def _store(self) -> "S3Store | GCSStore | AzureStore | LocalStore":
        try:
            return _open_store(self._config)
        except (BaseError, OSError, ValueError) as exc:
            raise ConfigError(f"url: {self._config.url} cannot be used: {_first_line(exc)}") from exc

    async def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object that is not there yet. One that is there with these bytes counts as written: an earlier
        attempt has happened. Raises StoreUnavailable if it has others."""
        mode = "create" if self._config.put_if_absent else "overwrite"

        async def attempt() -> None:
            try:
                await obstore.put_async(self._store, name, data, mode=mode, use_multipart=False)
            except AlreadyExistsError:
                stored = await obstore.get_async(self._store, name)
                if bytes(await stored.bytes_async()) != data:
                    _log.error("the object %r is there already and has other bytes", name)
                    raise StoreUnavailable("The object store has another object of this name.") from None

        try:
            with _translating_errors(self._config.url):
                await self._repeat(attempt)
        except FileNotFoundError as exc:
            raise StoreUnavailable("The object store lost an object while it was written. Try again.") from exc

    async def get(self, name: str) -> bytes | None:
        """Return all bytes of a small object; None if there is none."""

        async def attempt() -> bytes:
            return bytes(await (await obstore.get_async(self._store, name)).bytes_async())

        with suppress(FileNotFoundError), _translating_errors(self._config.url):
            return await self._repeat(attempt)
        return None

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`, fewer where the object ends. Raises FileNotFoundError."""

        async def attempt() -> bytes:
            return bytes(await obstore.get_range_async(self._store, name, start=start, end=end))

        with _translating_errors(self._config.url):
            return await self._repeat(attempt)

    async def list(self, prefix: str = "") -> AsyncGenerator[Sequence[StoredObject]]:
        """Yield the objects whose names begin with the folder `prefix`, in pages, in no certain order."""
        with _translating_errors(self._config.url):
            async for page in self._list(prefix or None):
                yield [StoredObject(each["path"], each["last_modified"].timestamp()) for each in page]

    def _list(self, prefix: str | None) -> "AsyncIterable[Sequence[ObjectMeta]]":
        # untyped, because one of its forms returns types of a package that is absent
        return cast("Any", obstore).list(self._store, prefix, chunk_size=_LIST_PAGE)

    async def delete_cut_writes(self, is_object: Callable[[str], bool], before: float) -> int:
        """Delete what writes that were cut off have left, of those last written `before` a time in seconds since the
        epoch; return their number. Only a file system has such leftovers: an object is written next to its place first,
        under its name and a number, and no listing has it. `is_object` recognises the names of objects."""
        if not isinstance(self._store, LocalStore):
            return 0
        with _translating_errors(self._config.url):
            return await asyncio.to_thread(_delete_cut_writes, self._config.url, is_object, before)

    async def _repeat(self, attempt: Callable[[], Coroutine[Any, Any, _ResultT]]) -> _ResultT:
        """Return the result of the first attempt that does not fail in a way that may pass."""
        deadline = monotonic() + self._config.retry_timeout_s
        for number in range(1, _ATTEMPTS):
            try:
                return await attempt()
            except (PermissionDeniedError, UnauthenticatedError, AlreadyExistsError):
                raise
            except BaseError as exc:
                if monotonic() > deadline:
                    raise
                _log.info("attempt %d at an object failed: %s", number, _first_line(exc))
            await asyncio.sleep(random.uniform(0, _MAX_PAUSE_S))  # noqa: S311 - not a secret
        return await attempt()

    async def delete_folder(self, prefix: str) -> None:
        """Delete all objects whose names begin with the folder `prefix`."""
        with _translating_errors(self._config.url):
            async for page in self._list(prefix):
                # a file system reports those that another process has deleted, and goes on
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, [each["path"] for each in page])


@contextmanager
def _translating_errors(url: str) -> Generator[None]:
    """Raise the errors of the library as ours, with the details in the log alone. FileNotFoundError stays."""
    try:
        yield
    except FileNotFoundError as exc:
        if "NoSuchBucket" not in str(exc):
            raise
        raise _refused(url, exc) from exc
    except (PermissionDeniedError, UnauthenticatedError) as exc:
        raise _refused(url, exc) from exc
    except (BaseError, OSError, ValueError) as exc:
        if "NoSuchBucket" in str(exc):
            raise _refused(url, exc) from exc
        _log.warning("the object store %s failed: %s", url, _first_line(exc))
        raise StoreUnavailable("The object store of the files cannot be reached, or failed. Try again.") from exc
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":  # a bug of the library, which no `except Exception` stops
            _log.exception("the client of the object store %s failed on a bug", url)
            raise StoreUnavailable("The object store of the files cannot be used.") from exc
        raise


def _refused(url: str, exc: Exception) -> ObjectStoreRefused:
    _log.error("the object store %s refuses this server: %s", url, _first_line(exc))
    return ObjectStoreRefused("The object store of the files refuses this server. Its log says more.")


def _delete_cut_writes(url: str, is_object: Callable[[str], bool], before: float) -> int:
    root = Path(_find_folder(url))
    count = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            match = _CUT_WRITE.fullmatch(path.relative_to(root).as_posix())
            if match is None or not is_object(match[1]):
                continue
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < before:
                    path.unlink()
                    count += 1
    return count


def _find_folder(url: str) -> str:
    return unquote(urlsplit(url).path)


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0][:500]


def _open_store(config: ObjectStoreConfig) -> "S3Store | GCSStore | AzureStore | LocalStore":
    url = urlsplit(config.url)
    if url.scheme == "file":
        return LocalStore(_find_folder(config.url), mkdir=True, automatic_cleanup=True)
    prefix = url.path.strip("/") or None
    endpoint = config.endpoint
    is_plain = endpoint is not None and endpoint.startswith("http://")
    client: Any = {
        "allow_http": is_plain,
        "timeout": timedelta(seconds=config.timeout_s),
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
    }
    retries: Any = {"max_retries": config.max_retries, "retry_timeout": timedelta(seconds=config.retry_timeout_s)}
    options: Any = {"prefix": prefix, "client_options": client, "retry_config": retries}
    if url.scheme == "gs":
        return GCSStore(url.netloc, config=_present({"base_url": endpoint}), **options)
    if url.scheme == "az":
        return AzureStore(url.netloc, config=_present({"endpoint": endpoint}), **options)
    if endpoint is not None and not config.path_style:
        endpoint = endpoint.replace("://", f"://{url.netloc}.", 1)
    fields = {
        "endpoint": endpoint,
        "region": config.region,
        "virtual_hosted_style_request": not config.path_style,
        "checksum_algorithm": "SHA256" if config.checksums else None,
        "server_side_encryption": config.encryption,
        "sse_kms_key_id": config.kms_key_id,
    }
    return S3Store(url.netloc, config=_present(fields), **options)


def _present(fields: dict[str, Any]) -> Any:
    return {key: value for key, value in fields.items() if value is not None}
