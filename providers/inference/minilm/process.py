"""Keeps the child process of the embedded embeddings: starts it when needed, asks it one thing at a time, ends it.

A native crash then costs the request that was running, not the server. See child.py for the other side.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from apis.errors import ContextLengthExceeded, UpstreamError, UpstreamTimeout

_CHILD_SCRIPT: Final = Path(__file__).with_name("child.py")
THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
MAX_LINE_BYTES: Final = 1024 * 1024
PROCESS_ERRORS: Final = (OSError, ValueError, asyncio.IncompleteReadError)

logger = logging.getLogger(__name__)


class TooManyTokens(ContextLengthExceeded):
    """The text at `position` of those that were asked for is longer than the model takes."""

    def __init__(self, position: int, tokens: int) -> None:
        super().__init__(f"A text of {tokens} tokens is too long to be embedded.")
        self.position, self.tokens = position, tokens


class EmbeddingProcess:
    """One child process at a time. Its first start is the caller's; one that died is started again when it is asked."""

    def __init__(self, folder: Path, threads: int, start_timeout_s: float, answer_timeout_s: float) -> None:
        self._folder = folder
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._request_lock = asyncio.Lock()
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._dimensions = 0

    async def start(self) -> int:
        """Returns the length of the vectors when the model is loaded. Raises UpstreamError when it cannot be."""
        async with self._request_lock:
            return await self._start_process()

    async def close(self) -> None:
        """Ends the child, and what is being asked of it; safe when none was started."""
        running = tuple(self._request_tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._kill_process()

    async def embed(self, texts: Sequence[str]) -> tuple[int, list["array[float]"]]:
        """How many tokens the texts have, and a vector for each. Raises TooManyTokens, UpstreamError."""
        # A caller may leave at any time; the child's answer is to be read all the same, lest the next one get it.
        task = asyncio.create_task(self._embed_locked(texts))
        self._request_tasks.add(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._request_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, though nobody may be waiting for it any more

    async def _embed_locked(self, texts: Sequence[str]) -> tuple[int, list["array[float]"]]:
        async with self._request_lock:
            if self._process is None:
                await self._start_process()
            try:
                async with asyncio.timeout(self._answer_timeout_s):
                    return await self._exchange(texts)
            except TooManyTokens:
                raise
            except BaseException as exc:
                await self._kill_process()
                if isinstance(exc, TimeoutError):
                    what = f"answer_timeout_s ({self._answer_timeout_s:g} s)"
                    raise UpstreamTimeout(f"The embedding model did not answer within {what}.") from exc
                if isinstance(exc, PROCESS_ERRORS):
                    logger.error("The embedding model's process ended: %s.", type(exc).__name__)
                    raise UpstreamError("The embedding model stopped. It is started again when it is asked.") from exc
                raise

    async def _exchange(self, texts: Sequence[str]) -> tuple[int, list["array[float]"]]:
        assert self._process is not None
        reader, writer = self._process.stdout, self._process.stdin
        assert reader is not None
        assert writer is not None
        question = await asyncio.to_thread(json.dumps, texts)
        writer.write(question.encode() + b"\n")
        await writer.drain()
        answer = json.loads(await reader.readline() or b"{}")
        if found := answer.get("too_long"):
            raise TooManyTokens(*found)
        if "tokens" not in answer:
            raise ValueError(answer.get("error", "no answer"))
        width = 4 * self._dimensions
        raw = await reader.readexactly(len(texts) * width)
        vectors = [array("f", raw[start : start + width]) for start in range(0, len(raw), width)]
        if sys.byteorder == "big":
            for vector in vectors:
                vector.byteswap()
        return sum(answer["tokens"]), vectors

    async def _start_process(self) -> int:
        pipe = asyncio.subprocess.PIPE
        bounds = dict.fromkeys(THREAD_VARIABLES, str(self._threads))
        # A session of its own: Ctrl-C reaches the whole group, and the server is to end the child when it has drained.
        # -P: the child's own folder must not shadow what it imports.
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_CHILD_SCRIPT), str(self._folder)),
            stdin=pipe,
            stdout=pipe,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            env={**os.environ, **bounds, "TOKENIZERS_PARALLELISM": "false"},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                answer = json.loads(await process.stdout.readline() or b"{}")
            self._dimensions = int(answer["dimensions"]) if "dimensions" in answer else 0
        except BaseException as exc:
            await self._kill_process()
            if isinstance(exc, TimeoutError):
                what = f"start_timeout_s ({self._start_timeout_s:g} s)"
                raise UpstreamError(f"The embedding model was not ready within {what}.") from exc
            raise
        if not self._dimensions:
            await self._kill_process()
            said = answer.get("error", "its process ended before it was ready")
            raise UpstreamError(f"The embedding model could not be loaded: {said}.")
        return self._dimensions

    async def _kill_process(self) -> None:
        """Killed, because it holds nothing that would be lost."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
