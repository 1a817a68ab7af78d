"""The engine's process: it comes back, it stops, and it never outlives the server."""

import asyncio
import logging
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from apis.errors import ConfigError, UpstreamError
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.providers.llama_cpp.asking import MODEL, ask, chat_request, finish_of, small_config, text_of
from tests.support.servers.ended_processes import running_children

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("small_file")]

CHILD = "llama_cpp/child.py"
PARENT = """
import asyncio
import sys
from providers.inference.llama_cpp.provider import LlamaCpp

async def main():
    inference = LlamaCpp(LlamaCpp.Config(model_path=sys.argv[1], threads=1, context_tokens=512, parallel=1), None)
    await inference.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(small_file: Path) -> AsyncGenerator[LlamaCpp]:
    """An engine of the test's own, for one request at a time."""
    inference = LlamaCpp(small_config(model=MODEL, model_path=small_file, parallel=1), None)
    try:
        await inference.start()
        yield inference
    finally:
        await inference.close()


def children_of(pid: int) -> set[int]:
    return {child.pid for child in running_children(CHILD, pid)}


def ended(pid: int, timeout_s: float) -> bool:
    """Return true if the process ends in time; one that no parent has reaped has ended, too."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(fd)


@contextmanager
def log_event(part: str, caplog: pytest.LogCaptureFixture) -> Generator[asyncio.Event]:
    """Sets the event when something is logged that has `part` in it."""
    event = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if part in record.getMessage():
                event.set()

    listener = Listener()
    logger = logging.getLogger("providers.inference.llama_cpp.engine")
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(listener)
        try:
            yield event
        finally:
            logger.removeHandler(listener)


async def test_a_killed_engine_fails_its_request_and_serves_the_next(
    small_llama: LlamaCpp, small_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = children_of(os.getpid())
    inference = LlamaCpp(small_config(model=MODEL, model_path=small_file, parallel=1), None)
    await inference.start()
    try:
        (pid,) = children_of(os.getpid()) - others
        with log_event("runs again", caplog) as again, log_event("is started again", caplog) as noticed:
            chat = inference.chat(chat_request("Write a very long story.", max_completion_tokens=1000))
            async with asyncio.timeout(60), aclosing(chat):
                await anext(chat)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(UpstreamError, match=r"llama\.cpp"):
                    async for _ in chat:
                        pass
                await noticed.wait()
                with pytest.raises(UpstreamError, match=r"llama\.cpp"):
                    await ask(inference)
                await again.wait()
        assert text_of(await ask(inference))
    finally:
        await inference.close()
    assert children_of(os.getpid()) == others
    assert text_of(await ask(small_llama))


@pytest.mark.long
async def test_an_abandoned_request_frees_its_slot(fresh: LlamaCpp) -> None:
    await ask(fresh, max_completion_tokens=1)
    chat = fresh.chat(chat_request("Write a very long story.", max_completion_tokens=1500, logit_bias={"2": -100.0}))
    async with asyncio.timeout(60):
        await anext(chat)
    async with asyncio.timeout(1):
        await chat.aclose()
        assert finish_of(await ask(fresh, max_completion_tokens=1)).usage.output_tokens == 1


async def test_the_engine_ends_with_a_server_that_is_killed(small_file: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(small_file), cwd=Path(__file__).parents[3], stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await parent.stdout.readline() == b"ready\n"
        (pid,) = children_of(parent.pid)
    finally:
        parent.kill()
        await parent.wait()
    assert await asyncio.to_thread(ended, pid, 5)


async def test_close_is_safe_before_start_and_twice() -> None:
    inference = LlamaCpp(small_config(), None)
    await inference.close()
    await inference.close()


async def test_a_file_that_is_no_model_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("These are not the weights.")
    before = children_of(os.getpid())
    with pytest.raises(ConfigError, match=r"notes\.gguf(.|\n)*magic"):
        await LlamaCpp(small_config(model_path=str(path)), None).start()
    assert children_of(os.getpid()) == before


async def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        await LlamaCpp(small_config(model_path=str(tmp_path / "none.gguf")), None).start()


async def test_an_unknown_packaged_model_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        await LlamaCpp(small_config(model="gpt-9"), None).start()
