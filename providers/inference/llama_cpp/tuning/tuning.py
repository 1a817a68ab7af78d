"""tune_settings: the threads and the batch size with which a model is fastest here, from a measurement of some seconds.

A child process measures a stand-in of the model (sample_file.py), so that a file of many gigabytes takes no longer than
a small one. The result is stored in the folder of models, by file, machine and version of the engine; to measure again,
remove the file that the log names. A machine that is busy with other work is not measured: there, threads that wait for
each other at every operation would be compared by how seldom they run.
"""

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import psutil

from providers.common.machine import usable_cores
from providers.inference.llama_cpp.engine import DEFAULT_BATCH_TOKENS, LlamaCppSettings
from providers.inference.llama_cpp.models.machine import thread_environment
from providers.inference.llama_cpp.models.packages import hold_file_lock, models_dir

_CHILD_SCRIPT: Final = Path(__file__).with_name("measure_child.py")
_BUDGET_S: Final = 3.0
"""Seconds of the whole measurement. A try that has not ended then does not count."""
_MIN_FILE_BYTES: Final = 128 * 2**20
"""Smaller models are fast enough with any number of threads."""
_BUSY_PERCENT: Final = 30.0
_BUSY_INTERVAL_S: Final = 0.2
_ENOUGH: Final = 0.95
"""Share of the best speed for which fewer threads are taken: the cores that are saved serve the requests."""
_BATCHES: Final = (256, 1024)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of the stand-in with so many threads and tokens in a batch: `decode` of the output, `prefill`
    of the prompt."""

    threads: int
    batch: int
    decode: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """`threads` make tokens, `batch_threads` read prompts, `batch_tokens` of them at once. `speeds` are the
    measurements, empty if none ended in time."""

    threads: int
    batch_threads: int
    batch_tokens: int
    speeds: tuple[Speed, ...] = ()


_decode_speed = msgspec.json.Decoder(Speed).decode
_decode_tuning = msgspec.json.Decoder(Tuning).decode


async def tune_settings(settings: LlamaCppSettings) -> LlamaCppSettings:
    """Return the settings with the number of threads, and with batches, for settings without a number of threads. The
    first call for a model takes at most some seconds."""
    if settings.threads is not None:
        return settings
    tuning = await _find_tuning(settings)
    return replace(
        settings, threads=tuning.threads, batch_threads=tuning.batch_threads, batch_tokens=tuning.batch_tokens
    )


async def _find_tuning(settings: LlamaCppSettings) -> Tuning:
    path, cores = Path(settings.model_path), await asyncio.to_thread(usable_cores)
    threads = threads_to_try(cores, await asyncio.to_thread(psutil.cpu_count, logical=False) or cores)
    untuned = Tuning(threads[0], threads[0], DEFAULT_BATCH_TOKENS)
    if len(threads) == 1 or settings.is_embedding:
        return untuned
    try:
        stored_at = await asyncio.to_thread(_place_result, path, cores)
        if stored_at is None:
            return untuned
        async with hold_file_lock(stored_at.with_suffix(".lock")):
            tuning = await asyncio.to_thread(_load, stored_at, cores)
            if tuning is None and await asyncio.to_thread(psutil.cpu_percent, _BUSY_INTERVAL_S) > _BUSY_PERCENT:
                _log.info("The machine is busy: %s is not measured and has %d threads.", settings.model, threads[0])
                return untuned
            if tuning is None:
                tuning = choose_tuning(await _measure(path, threads), untuned)
                await asyncio.to_thread(stored_at.write_bytes, json.dumps(asdict(tuning), indent=1).encode())
    except OSError as exc:
        _log.warning("The speed of the model %s could not be measured: %s", settings.model, exc)
        return untuned
    _log.info(
        "The model %s: %d threads for tokens, %d for prompts, in batches of %d (%s).",
        *(settings.model, tuning.threads, tuning.batch_threads, tuning.batch_tokens, stored_at),
    )
    return tuning


def _place_result(path: Path, cores: int) -> Path | None:
    """Return the file of the result, in a folder that exists; None for a model that is not measured."""
    if path.stat().st_size < _MIN_FILE_BYTES:
        return None
    stored_at = models_dir() / "tuning" / f"{path.stem}-{_digest(path, cores)}.json"
    stored_at.parent.mkdir(parents=True, exist_ok=True)
    return stored_at


def threads_to_try(cores: int, physical_cores: int) -> list[int]:
    """Return numbers of threads, the default first: all cores but one, which serves the requests."""
    tries = [max(cores - 1, 1), cores, min(physical_cores, cores), max(min(physical_cores, cores) - 1, 1)]
    return list(dict.fromkeys([*tries, max(cores // 2, 1)]))


def choose_tuning(speeds: Sequence[Speed], untuned: Tuning) -> Tuning:
    """Return the fastest threads and batches; fewer threads win when they are hardly slower."""
    by_threads = sorted((speed for speed in speeds if speed.batch == untuned.batch_tokens), key=lambda one: one.threads)
    if not by_threads:
        return untuned
    best_decode = max(speed.decode for speed in by_threads)
    best_prefill = max(speed.prefill for speed in by_threads)
    decoding = next(speed for speed in by_threads if speed.decode >= _ENOUGH * best_decode)
    reading = next(speed for speed in by_threads if speed.prefill >= _ENOUGH * best_prefill)
    others = [speed for speed in speeds if speed.batch != untuned.batch_tokens]
    batch = max(others, key=lambda one: one.prefill, default=None)
    is_better = batch is not None and batch.prefill * _ENOUGH > best_prefill
    batch_tokens = batch.batch if batch is not None and is_better else untuned.batch_tokens
    return Tuning(decoding.threads, reading.threads, batch_tokens, tuple(speeds))


def _load(path: Path, cores: int) -> Tuning | None:
    """Return the stored result; None without one, or with one that cannot be used here."""
    try:
        tuning = _decode_tuning(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    is_possible = 1 <= tuning.threads <= cores and 1 <= tuning.batch_threads <= cores
    return tuning if is_possible and tuning.batch_tokens in (DEFAULT_BATCH_TOKENS, *_BATCHES) else None


def _digest(path: Path, cores: int) -> str:
    """Return what identifies the file, the machine and the engine; the version of this measurement is part of it."""
    stat = path.stat()
    file = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    engine = importlib.metadata.version("xllamacpp")
    machine = (platform.machine(), _processor_name(), os.cpu_count(), cores)
    return hashlib.sha256(repr((1, file, engine, machine)).encode()).hexdigest()[:16]


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


async def _measure(path: Path, threads: Sequence[int]) -> list[Speed]:
    """Return the measurements that end in time."""
    speeds: list[Speed] = []
    try:
        async with asyncio.timeout(_BUDGET_S), _open_child(path, threads) as lines, aclosing(lines):
            async for line in lines:
                speeds.append(_decode_speed(line))  # noqa: PERF401 - the time may end before the list does
    except (TimeoutError, msgspec.DecodeError):
        pass
    return speeds


@asynccontextmanager
async def _open_child(path: Path, threads: Sequence[int]) -> AsyncGenerator[AsyncGenerator[bytes]]:
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="stack-tuning-")
    environment = await asyncio.to_thread(thread_environment, max(threads))
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_CHILD_SCRIPT)),
            stdin=pipe,
            stdout=pipe,
            stderr=null,
            start_new_session=True,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        sample_path = str(Path(folder) / "sample.gguf")
        settings = {"model_path": str(path), "sample_path": sample_path, "threads": threads, "batches": _BATCHES}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        yield _read_lines(process.stdout)
    finally:
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _read_lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while line := await stream.readline():
        yield line
