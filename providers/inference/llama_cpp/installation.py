"""CatalogueInstaller: fetches models of the catalogue for a running server, one at a time on each machine.

    /model_pull/HOST         the present fetch, or the last one
    /model_pull_lease/HOST   held by the process that fetches
    /models_installed/HOST   the names of the models that were fetched, which are served after a restart

Files are of a machine, so each machine that shares the store has its own records.
"""

import asyncio
import logging
import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from apis.errors import ConfigError, Conflict, InvalidRequest, UpstreamError
from apis.fair_share import FairShare
from apis.model_pulls import InstallableModel, ModelInstaller, ModelLibrary, ModelPull, PullStatus
from apis.storage.kv_store import KVStore, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.common.jobs import Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.change import change
from providers.common.state.scan import decode_or_skip
from providers.common.state.worker_signs import WorkerSign
from providers.inference.model_files.catalogue import CATALOGUE
from providers.inference.model_files.library import GgufLibrary, LibraryListing, LibraryModel
from providers.inference.model_files.machine import inspect_machine
from providers.inference.model_files.references import parse_reference
from providers.inference.model_files.resolve import LocalModel, resolve_model

_log = logging.getLogger(__name__)

LEASE_S: Final = 10.0
_POLL_S: Final = 5.0
_PROGRESS_S: Final = 0.5
LIST_TIMEOUT_S: Final = 120.0
"""Seconds for finding the files of a model that are here."""
_LISTING_S: Final = 30.0
"""Seconds for which a listing is kept: it costs two child processes."""
_CLOSE_TIMEOUT_S: Final = 3.0
_SPARE_DISK_BYTES: Final = 500_000_000
_ACTIVE: Final[Collection[PullStatus]] = frozenset({"queued", "in_progress"})


class PullRecord(JobRecord, kw_only=True):
    """The fetch of one model, with the attempts at it."""

    model: str
    status: PullStatus
    total_bytes: int
    created_at: float
    done_bytes: int = 0
    error: str | None = None

    def to_pull(self) -> ModelPull:
        """Return the fetch as the API shows it."""
        done_bytes = self.total_bytes if self.status == "completed" else self.done_bytes
        return ModelPull(self.model, self.status, self.total_bytes, done_bytes, self.created_at, self.error)


class InstalledRecord(msgspec.Struct):
    """The names of the models that were fetched to this machine."""

    names: list[str] = []


@dataclass(slots=True)
class _Progress:
    done_bytes: int = 0

    def advance(self, done_bytes: int) -> None:
        self.done_bytes = done_bytes


class ModelPulls(JobQueue[str, PullRecord]):
    """The fetches of this machine, and the models that they have brought."""

    title = "fetches of models"

    def __init__(self, kv: KVStore, library: GgufLibrary, *, lease_s: float = LEASE_S, poll_s: float = _POLL_S) -> None:
        """A fetch whose process has ended goes on after `lease_s`."""
        super().__init__(kv, PullRecord, FairShare(self.title, 1), retry_s=lease_s)
        host = platform.node()
        self._key, self._lease_key = f"/model_pull/{host}", f"/model_pull_lease/{host}"
        self._installed_key = f"/models_installed/{host}"
        self._library = library
        self._lease_s = lease_s
        self._sign = WorkerSign(kv, lease_s)
        self._jobs = LeasedJobs(self, self._sign, poll_s)
        self._listing: LibraryListing | None = None
        self._listed_at = 0.0
        self._listing_lock = asyncio.Lock()

    def start(self) -> None:
        """Begin to look for fetches."""
        self._sign.start()
        self._jobs.start()

    async def close(self) -> None:
        """Stop; an unfinished fetch is released to another process, or to the next start."""
        await self._jobs.close(_CLOSE_TIMEOUT_S)
        await self._sign.close()

    async def list_library(self, served_names: Collection[str]) -> ModelLibrary:
        """Return the models of the catalogue; `served_names` are those that are served. Raises ConfigError."""
        listing = await self._list()
        models = [_describe(row, listing, row.name in served_names) for row in listing.models if row.name in CATALOGUE]
        return ModelLibrary(models, listing.machine, listing.memory_bytes, listing.disk_free_bytes)

    async def begin(self, model: str, served_names: Collection[str]) -> ModelPull:
        """See `ModelInstaller.begin_pull`."""
        library = await self.list_library(served_names)
        row = next((each for each in library.models if each.name == model), None)
        if row is None:
            names = ", ".join(each.name for each in library.models)
            raise InvalidRequest(f"There is no model '{model}' in the catalogue: {names}.", param="name")
        if row.is_served:
            raise Conflict(f"The model '{model}' is served already.")
        if row.reason:
            raise InvalidRequest(f"The model '{model}' cannot be fetched: {row.reason}", param="name")

        def edit(record: PullRecord | None) -> PullRecord:
            if record is not None and record.status in _ACTIVE:
                raise Conflict(f"One model is fetched at a time, now '{record.model}'. Cancel it, or wait for its end.")
            return PullRecord(model=model, status="queued", total_bytes=row.size_bytes, created_at=time.time())

        record = await change(self.kv, self._key, PullRecord, edit)
        assert record is not None
        self._jobs.wake()
        return record.to_pull()

    async def find(self) -> ModelPull | None:
        """Return the present fetch, else the last one."""
        entry = await self.kv.get(self._key)
        record = None if entry is None else decode_or_skip(self.kv, self._key, entry, PullRecord)
        return None if record is None else record.to_pull()

    async def cancel(self) -> ModelPull | None:
        """See `ModelInstaller.cancel_pull`."""
        await self._set_status("cancelled")
        await self._jobs.cancel([self._lease_key], _CLOSE_TIMEOUT_S)
        return await self.find()

    async def list_installed(self) -> Sequence[str]:
        """Return the names of the models that were fetched to this machine."""
        entry = await self.kv.get(self._installed_key)
        record = None if entry is None else decode_or_skip(self.kv, self._installed_key, entry, InstalledRecord)
        return () if record is None else record.names

    async def forget_installed(self, name: str) -> None:
        """Serve a model no more after the next start: its files are gone."""

        def edit(record: InstalledRecord | None) -> InstalledRecord | None:
            return None if record is None else InstalledRecord([each for each in record.names if each != name])

        await change(self.kv, self._installed_key, InstalledRecord, edit)

    async def list_waiting(self) -> AsyncGenerator[Job[str]]:
        """Yield the fetch that has not ended, if there is one."""
        entry = await self.kv.get(self._key)
        record = None if entry is None else decode_or_skip(self.kv, self._key, entry, PullRecord)
        if record is not None and record.status in _ACTIVE:
            yield Job("", record.model, self._lease_key, self._lease_s, self._key, entry)

    async def build_record_ops(self, claim: Claim[str, PullRecord]) -> list[Op]:
        """Return the operation that stores the attempts; the rest of the record is as others have left it."""
        entry = await self.kv.get(self._key)
        if entry is None:
            return []
        record = decode_record(entry, PullRecord)
        record.attempts, record.handovers = claim.record.attempts, claim.record.handovers
        record.workers = claim.record.workers
        return [Put(self._key, encode_record(record), None, entry.version)]

    async def run(self, claim: Claim[str, PullRecord]) -> None:
        """Fetch the model, and store how far it is; end it when its record says that it was cancelled."""
        name, progress = claim.subject, _Progress()
        fetching = asyncio.create_task(self._library.pull(name, progress.advance))
        try:
            while not fetching.done():
                await asyncio.wait({fetching}, timeout=_PROGRESS_S)
                claim.lease.check()
                if not await self._set_status("in_progress", done_bytes=progress.done_bytes):
                    return
            try:
                fetching.result()
            except ConfigError as exc:
                await self._set_status("failed", error=str(exc))
                return
            await change(self.kv, self._installed_key, InstalledRecord, lambda record: _add_name(record, name))
            await self._set_status("completed")
        finally:
            self._listing = None
            fetching.cancel()
            with suppress(asyncio.CancelledError, ConfigError):
                await fetching

    async def fail(self, claim: Claim[str, PullRecord], lost_workers: int) -> None:
        """End the fetch: it has cost processes."""
        await self._set_status("failed", error="The processes that fetched it have ended. Try again.")

    async def _set_status(self, status: PullStatus, *, done_bytes: int | None = None, error: str | None = None) -> bool:
        """Change the fetch that has not ended; return False where it has."""

        def edit(record: PullRecord | None) -> PullRecord | None:
            if record is None or record.status not in _ACTIVE:
                return None
            record.status, record.error = status, error
            record.done_bytes = record.done_bytes if done_bytes is None else done_bytes
            return record

        return await change(self.kv, self._key, PullRecord, edit) is not None

    async def _list(self) -> LibraryListing:
        async with self._listing_lock:
            now = time.monotonic()
            if self._listing is None or now - self._listed_at > _LISTING_S:
                self._listing, self._listed_at = await self._library.list_models(), now
            return self._listing


class CatalogueInstaller(ModelInstaller):
    """The installer of one provider: `add` serves a model whose files are here; `served_names` are those that are."""

    def __init__(
        self,
        kv: KVStore,
        served_names: Callable[[], Collection[str]],
        add: Callable[[LocalModel, int], Awaitable[None]],
        library: GgufLibrary | None = None,
    ) -> None:
        """`add` also gets the bytes of memory that models may take now."""
        self._library = library or GgufLibrary()
        self._pulls = ModelPulls(kv, self._library)
        self._served_names = served_names
        self._add = add
        self._adding = asyncio.Lock()
        self._unusable: set[str] = set()

    def start(self) -> None:
        """Begin to look for fetches."""
        self._pulls.start()

    async def close(self) -> None:
        """Stop; an unfinished fetch goes on in another process, or after the next start."""
        await self._pulls.close()

    async def list_library(self) -> ModelLibrary:
        await self.serve_installed()
        with _show_faults():
            return await self._pulls.list_library(self._served_names())

    async def begin_pull(self, name: str) -> ModelPull:
        await self.serve_installed()
        self._unusable.discard(name)
        with _show_faults():
            return await self._pulls.begin(name, self._served_names())

    async def find_pull(self) -> ModelPull | None:
        return await self._pulls.find()

    async def cancel_pull(self) -> ModelPull | None:
        return await self._pulls.cancel()

    async def serve_installed(self) -> None:
        """Add the models that were fetched since, by this process or by another one of this machine. One that cannot be
        used is logged, and left out until this process ends."""
        if all(name in self._served_names() or name in self._unusable for name in await self._pulls.list_installed()):
            return
        async with self._adding:
            for name in await self._pulls.list_installed():
                if name in self._served_names() or name in self._unusable:
                    continue
                try:
                    await self._add_installed(name)
                except ConfigError as exc:
                    self._unusable.add(name)
                    _log.error("The model %s was fetched, and cannot be served: %s", name, exc)

    async def _add_installed(self, name: str) -> None:
        if not await self._library.is_on_disk(name):
            await self._pulls.forget_installed(name)
            return
        local = await resolve_model(parse_reference(name), LIST_TIMEOUT_S)
        await self._add(local, (await inspect_machine()).model_bytes)


@contextmanager
def _show_faults() -> Generator[None]:
    """Show a fault of the catalogue's machinery to the client: it says what the operator has to do."""
    try:
        yield
    except ConfigError as exc:
        raise UpstreamError(str(exc)) from exc


def _add_name(record: InstalledRecord | None, name: str) -> InstalledRecord:
    names = [] if record is None else record.names
    return InstalledRecord([*(each for each in names if each != name), name])


def _describe(row: LibraryModel, listing: LibraryListing, is_served: bool) -> InstallableModel:  # noqa: FBT001 - a fact of the row
    memory_bytes = row.memory_bytes or row.size_bytes
    missing_bytes = row.size_bytes - row.disk_bytes
    reason = None
    if row.fits is False:
        reason = (
            f"it needs about {memory_bytes / 1e9:.1f} GB of memory, and models may take "
            f"{listing.memory_bytes / 1e9:.1f} GB here. End other programs, or take a smaller one."
        )
    elif missing_bytes > 0 and listing.disk_free_bytes < missing_bytes + _SPARE_DISK_BYTES:
        reason = (
            f"{missing_bytes / 1e9:.1f} GB are missing, and the disk of {listing.folders[-1]} has "
            f"{listing.disk_free_bytes / 1e9:.1f} GB free. Free some: stack models remove NAME"
        )
    return InstallableModel(
        row.name, row.kind, row.licence, row.size_bytes, memory_bytes, reason, row.is_suggested, is_served
    )
