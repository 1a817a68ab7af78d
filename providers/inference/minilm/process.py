"""Supervisor of the MiniLM child process: starts it when needed, sends it one message at a time, ends it.

A native crash then fails only the current request, not the server. See child.py for the other side.
"""

import asyncio
import itertools
import json
import logging
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from apis.errors import ContextLengthExceeded, UpstreamError, UpstreamTimeout
from apis.fair_share import FairShare, Place
from providers.common.processes.child import build_compute_environment
from providers.common.processes.process import PIPE, Process, start_process

_CHILD_SCRIPT: Final = Path(__file__).with_name("child.py")
THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
MAX_LINE_BYTES: Final = 1024 * 1024
PROCESS_ERRORS: Final = (OSError, ValueError, asyncio.IncompleteReadError)

logger = logging.getLogger(__name__)


class TooManyTokens(ContextLengthExceeded):
    """The text at `position` in the request is longer than the model accepts."""

    def __init__(self, position: int, tokens: int) -> None:
        super().__init__(f"A text of {tokens} tokens is too long to be embedded.")
        self.position, self.tokens = position, tokens


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer to one step of a batch: empty, or the vectors after the last one."""

    token_count: int = 0
    vectors: Sequence["array[float]"] = ()


class EmbeddingProcess:
    """One child process at a time. The caller starts it first; one that died is restarted by the next request.

    Requests wait for a place of `admissions`, and then for a turn for each step, by time: a short one waits for at most
    one step of another tenant. One whose caller leaves before its turn is dropped.
    """

    def __init__(
        self, folder: Path, threads: int, start_timeout_s: float, answer_timeout_s: float, admissions: FairShare
    ) -> None:
        self._folder = folder
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._process: Process | None = None
        self._admissions = admissions
        self._turns = FairShare("steps of the embedding model", 1, by_time=True)
        self._is_closed = False
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._dimensions = 0
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []

    async def start(self) -> int:
        """Start the child and return the length of the vectors once the model is loaded. Raises UpstreamError when it
        cannot be loaded."""
        with await self._turns.acquire(""):
            return await self._start_process()

    async def close(self) -> None:
        """End the child and the requests in progress; safe when none was started."""
        self._is_closed = True
        running = tuple(self._request_tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._kill_process()

    async def embed(self, texts: Sequence[str], tenant: str) -> tuple[int, Sequence["array[float]"]]:
        """Return the total number of tokens and one vector per text. Raises TooManyTokens, UpstreamError, and
        RateLimited if too many requests of the tenant wait."""
        with await self._admissions.acquire(tenant):
            return await self._embed_in_steps(texts, tenant)

    async def _embed_in_steps(self, texts: Sequence[str], tenant: str) -> tuple[int, Sequence["array[float]"]]:
        number = next(self._numbers)
        try:
            answer = await self._make_turn({"id": number, "texts": texts}, tenant)
            process = self._process
            while not answer.vectors:
                # another request is served between two steps, which are short
                answer = await self._make_turn({"id": number}, tenant, process)
            return answer.token_count, answer.vectors
        except BaseException:
            self._dropped.append(number)
            raise

    async def _make_turn(self, message: dict[str, Any], tenant: str, process: Process | None = None) -> "_Answer":
        """Exchange one message when it is the tenant's turn; with the process that has begun the batch, if given."""
        # batches of one step go before further steps of longer ones
        turn = await self._turns.acquire(tenant, rank=int(process is not None))
        if self._is_closed or (process is not None and process is not self._process):
            turn.release()
            raise UpstreamError("The embedding model was stopped.")
        # The caller may be cancelled at any time; the child's response is read all the same, or the next request would
        # receive it.
        task = asyncio.create_task(self._exchange_in_turn(message, turn))
        self._request_tasks.add(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._request_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, although the caller may be gone

    async def _exchange_in_turn(self, message: dict[str, Any], turn: Place) -> "_Answer":
        with turn:
            if self._process is None:
                await self._start_process()
            try:
                async with asyncio.timeout(self._answer_timeout_s):
                    return await self._exchange(message)
            except TooManyTokens:
                raise
            except BaseException as exc:
                await self._kill_process()
                if isinstance(exc, TimeoutError):
                    limit = f"answer_timeout_s ({self._answer_timeout_s:g} s)"
                    raise UpstreamTimeout(f"The embedding model did not answer within {limit}.") from exc
                if isinstance(exc, PROCESS_ERRORS):
                    logger.error("The embedding model's process ended: %s.", type(exc).__name__)
                    raise UpstreamError("The embedding model stopped. It is started again when it is asked.") from exc
                raise

    async def _exchange(self, message: dict[str, Any]) -> "_Answer":
        assert self._process is not None
        reader, writer = self._process.stdout, self._process.stdin
        assert reader is not None
        assert writer is not None
        dropped = [number for number in self._dropped if number != message["id"]]  # its caller has just left
        self._dropped = [number for number in self._dropped if number == message["id"]]
        line = await asyncio.to_thread(json.dumps, {**message, "drop": dropped})
        writer.write(line.encode() + b"\n")
        await writer.drain()
        response = json.loads(await reader.readline() or b'{"error": "no answer"}')
        if too_long := response.get("too_long"):
            raise TooManyTokens(*too_long)
        if "error" in response:
            raise ValueError(response["error"])
        if "tokens" not in response:
            return _Answer()
        width = 4 * self._dimensions
        raw = await reader.readexactly(len(response["tokens"]) * width)
        vectors = [array("f", raw[start : start + width]) for start in range(0, len(raw), width)]
        if sys.byteorder == "big":
            for vector in vectors:
                vector.byteswap()
        return _Answer(sum(response["tokens"]), vectors)

    async def _start_process(self) -> int:
        bounds = dict.fromkeys(THREAD_VARIABLES, str(self._threads))
        # A session of its own: Ctrl-C reaches the whole group, and the server ends the child after it has drained. -P:
        # the child's own folder must not shadow its imports.
        self._process = process = await start_process(
            (sys.executable, "-P", str(_CHILD_SCRIPT), str(self._folder)),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            own_session=True,
            env={**build_compute_environment(), **bounds, "TOKENIZERS_PARALLELISM": "false"},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                response = json.loads(await process.stdout.readline() or b"{}")
            self._dimensions = int(response["dimensions"]) if "dimensions" in response else 0
        except BaseException as exc:
            await self._kill_process()
            if isinstance(exc, TimeoutError):
                limit = f"start_timeout_s ({self._start_timeout_s:g} s)"
                raise UpstreamError(f"The embedding model was not ready within {limit}.") from exc
            raise
        if not self._dimensions:
            await self._kill_process()
            error = response.get("error", "its process ended before it was ready")
            raise UpstreamError(f"The embedding model could not be loaded: {error}.")
        return self._dimensions

    async def _kill_process(self) -> None:
        """Kill the child; it has no state to lose."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()
