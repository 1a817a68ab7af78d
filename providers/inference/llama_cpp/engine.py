"""Keeps the local engine's child process running: starts it, notices its end, starts it again, stops it.

A native crash then costs the requests that were running, not the server. See llama_cpp_child.py for the other side.
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

CHILD: Final = Path(__file__).with_name("child.py")
FIRST_RESTART_DELAY_S: Final = 0.2
LAST_RESTART_DELAY_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 5.0
SHOWN_LOG_LINES: Final = 8
LOG_READ_BYTES: Final = 16 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the child is told. `sampling` are defaults for requests that say nothing, in the engine's own names."""

    model: str
    model_path: str
    context_tokens: int
    parallel: int
    threads: int
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the engine that runs now is reached. Each start has its own port and key."""

    url: str
    api_key: str


class EngineFailed(Exception):
    """The child did not come up; the message tells what it said last."""


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    log: asyncio.Task[None]
    lines: deque[str]
    address: Address


class Engine:
    """One child process at a time, from `start` to `close`."""

    def __init__(self, settings: Settings, start_timeout_s: float) -> None:
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._child: _Child | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the model is loaded. Raises ConfigError when it cannot be."""
        try:
            self._child = await self._spawn()
        except EngineFailed as exc:
            raise ConfigError(f"The local engine could not load {self._settings.model_path}: {exc}") from exc
        self._keeper = asyncio.create_task(self._keep(self._child))

    async def close(self) -> None:
        """Ends the child; safe when none was started."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        child, self._child = self._child, None
        if child is not None:
            await _end(child)

    def address(self) -> Address:
        """Raises UpstreamError while the engine is down."""
        if self._child is None or self._child.process.returncode is not None:
            raise UpstreamError("The local engine (llama.cpp) stopped and is being started again. Try again shortly.")
        return self._child.address

    async def _keep(self, child: _Child) -> None:
        """Replace every child that ends, ever more slowly while they end early."""
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RESTART_DELAY_S
        started_at = loop.time()
        while True:
            status = await child.process.wait()
            self._child = None
            await _end(child)
            if loop.time() - started_at > HEALTHY_AFTER_S:
                delay_s = FIRST_RESTART_DELAY_S
            logger.error("The local engine ended with status %d; it is started again in %g s.", status, delay_s)
            while True:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
                try:
                    child = await self._spawn()
                except EngineFailed as exc:
                    logger.error("The local engine did not start: %s Next try in %g s.", exc, delay_s)
                else:
                    break
            started_at = loop.time()
            self._child = child
            logger.info("The local engine runs again.")

    async def _spawn(self) -> _Child:
        """A child that has its model loaded."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C reaches the whole group, and the server is to end the child when it has drained.
        # -P: the child's own folder must not shadow what it imports.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(CHILD), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        lines = deque[str](maxlen=SHOWN_LOG_LINES)
        assert process.stderr is not None
        log = asyncio.create_task(_drain(process.stderr, lines))
        child = _Child(process, log, lines, Address("", secrets.token_urlsafe(32)))
        try:
            child.address = await self._greet(child)
        except BaseException:
            await _end(child)
            raise
        return child

    async def _greet(self, child: _Child) -> Address:
        process, key = child.process, child.address.api_key
        assert process.stdin is not None
        assert process.stdout is not None
        told = {**asdict(self._settings), "api_key": key}
        try:
            async with asyncio.timeout(self._start_timeout_s):
                process.stdin.write(json.dumps(told).encode() + b"\n")
                await process.stdin.drain()
                answer: dict[str, str] = json.loads(await process.stdout.readline() or "{}")
        except TimeoutError:
            raise EngineFailed(f"not ready within start_timeout_s ({self._start_timeout_s:g} s).") from None
        except (OSError, ValueError):
            answer = {}
        if address := answer.get("address"):
            return Address(address, key)
        await _end(child)
        said = "\n".join([*child.lines, answer.get("error", "it ended before it was ready.")])
        raise EngineFailed(said)


async def _end(child: _Child) -> None:
    """The child sees the end of its stdin and leaves; one that does not is killed."""
    process = child.process
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    await child.log


async def _drain(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    """Keep the child's stderr flowing. It may hold pieces of prompts, so it is logged for debugging only."""
    rest = b""
    while read := await stream.read(LOG_READ_BYTES):
        *whole, rest = (rest + read).split(b"\n")
        rest = rest[-LOG_READ_BYTES:]
        for line in whole:
            lines.append(line.decode("utf-8", "replace"))
            logger.debug("engine: %s", lines[-1])
