"""Supervisor of the local engine's child process: starts it, restarts it when it ends, stops it.

A native crash then fails only the requests in progress, not the server. See child.py for the other side.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from apis.errors import ConfigError, UpstreamError
from providers.common.processes.process import PIPE, Process, start_process
from providers.inference.llama_cpp.threads import thread_environment

_CHILD_SCRIPT: Final = Path(__file__).with_name("child.py")
FIRST_RESTART_DELAY_S: Final = 0.2
LAST_RESTART_DELAY_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 5.0
MAX_ERROR_LOG_LINES: Final = 8
LOG_READ_BYTES: Final = 16 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Speculation: up to `tokens` tokens are drafted, and the model checks them all at once. `model_path` is the model
    that drafts; without one, they are what followed the same tokens earlier in the prompt and output."""

    tokens: int
    model_path: str | None = None


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """Settings of the child process. `sampling` holds defaults for requests without values, in the engine's own names;
    `prompt_cache_mib` is memory for the caches of prompts that are in no slot; `projector_path` is the file through
    which the model sees images; an `is_embedding` model makes vectors and no text. With `reads_at_once` a text is read
    in one batch, because every token of it reads all the others."""

    model: str
    model_path: str
    context_tokens: int
    parallel: int
    threads: int
    sampling: Mapping[str, float]
    prompt_cache_mib: int = 0
    projector_path: str | None = None
    is_embedding: bool = False
    reads_at_once: bool = False
    drafts: DraftSettings | None = None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of the running engine. Each start has its own port and API key."""

    url: str
    api_key: str


class EngineStartError(Exception):
    """The child process did not start; the message includes its last log lines."""


@dataclass(slots=True)
class _Child:
    process: Process
    log_task: asyncio.Task[None]
    log_lines: deque[str]
    address: EngineAddress


class LlamaCppEngine:
    """One child process at a time, from `start` to `close`."""

    def __init__(self, settings: LlamaCppSettings, start_timeout_s: float) -> None:
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._child: _Child | None = None
        self._restart_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child and return when the model is loaded. Raises ConfigError when it cannot be loaded."""
        try:
            self._child = await self._spawn_child()
        except EngineStartError as exc:
            raise ConfigError(f"The local engine could not load {self._settings.model_path}: {exc}") from exc
        self._restart_task = asyncio.create_task(self._restart_when_ended(self._child))

    async def close(self) -> None:
        """End the child; safe when none was started."""
        restart_task, self._restart_task = self._restart_task, None
        if restart_task is not None:
            restart_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await restart_task
        child, self._child = self._child, None
        if child is not None:
            await _end_child(child)

    @property
    def is_running(self) -> bool:
        """True while the child serves; false while it is being started again."""
        return self._child is not None and self._child.process.returncode is None

    def address(self) -> EngineAddress:
        """Return the current address. Raises UpstreamError while the engine is down."""
        if self._child is None or not self.is_running:
            raise UpstreamError("The local engine (llama.cpp) stopped and is being started again. Try again shortly.")
        return self._child.address

    async def _restart_when_ended(self, child: _Child) -> None:
        """Restart the child each time it ends, with a growing delay while it ends early."""
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RESTART_DELAY_S
        started_at = loop.time()
        while True:
            status = await child.process.wait()
            self._child = None
            await _end_child(child)
            if loop.time() - started_at > HEALTHY_AFTER_S:
                delay_s = FIRST_RESTART_DELAY_S
            logger.error("The local engine ended with status %d; it is started again in %g s.", status, delay_s)
            while True:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
                try:
                    child = await self._spawn_child()
                except EngineStartError as exc:
                    logger.error("The local engine did not start: %s Next try in %g s.", exc, delay_s)
                else:
                    break
            started_at = loop.time()
            self._child = child
            logger.info("The local engine runs again.")

    async def _spawn_child(self) -> _Child:
        """Start a child and return it once its model is loaded."""
        environment = await asyncio.to_thread(thread_environment, self._settings.threads)
        # A session of its own: Ctrl-C reaches the whole group, and the server ends the child after it has drained. -P:
        # the child's own folder must not shadow its imports.
        process = await start_process(
            (sys.executable, "-P", str(_CHILD_SCRIPT)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            own_session=True,
            env=environment,
        )
        lines = deque[str](maxlen=MAX_ERROR_LOG_LINES)
        assert process.stderr is not None
        log = asyncio.create_task(_drain_log(process.stderr, lines))
        child = _Child(process, log, lines, EngineAddress("", secrets.token_urlsafe(32)))
        try:
            child.address = await self._handshake(child)
        except BaseException:
            await _end_child(child)
            raise
        return child

    async def _handshake(self, child: _Child) -> EngineAddress:
        process, key = child.process, child.address.api_key
        assert process.stdin is not None
        assert process.stdout is not None
        settings = {**asdict(self._settings), "api_key": key}
        try:
            async with asyncio.timeout(self._start_timeout_s):
                process.stdin.write(json.dumps(settings).encode() + b"\n")
                await process.stdin.drain()
                handshake: dict[str, str] = json.loads(await process.stdout.readline() or "{}")
        except TimeoutError:
            raise EngineStartError(f"not ready within start_timeout_s ({self._start_timeout_s:g} s).") from None
        except (OSError, ValueError):
            handshake = {}
        if address := handshake.get("address"):
            return EngineAddress(address, key)
        await _end_child(child)
        log_text = "\n".join([*child.log_lines, handshake.get("error", "it ended before it was ready.")])
        raise EngineStartError(log_text)


async def _end_child(child: _Child) -> None:
    """Close the child's stdin, which ends it; kill it if it does not exit."""
    process = child.process
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
    await child.log_task
    await process.end()


async def _drain_log(stream: asyncio.StreamReader, log_lines: deque[str]) -> None:
    """Read the child's stderr continuously. It may contain parts of prompts, so it is logged at debug level only."""
    partial_line = b""
    while read := await stream.read(LOG_READ_BYTES):
        *whole, partial_line = (partial_line + read).split(b"\n")
        partial_line = partial_line[-LOG_READ_BYTES:]
        for line in whole:
            log_lines.append(line.decode("utf-8", "replace"))
            logger.debug("engine: %s", log_lines[-1])
