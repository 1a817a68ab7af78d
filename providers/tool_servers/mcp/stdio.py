"""An MCP server as a child process: messages are lines on its standard input and output."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from providers.common.processes.process import PIPE, Process, start_process
from providers.tool_servers.mcp.messages import MAX_MESSAGE_BYTES, cut_deep_values
from providers.tool_servers.mcp.wire import CURRENT_EXCHANGE, SessionStreams

_EXIT_TIMEOUT_S: Final = 2.0

_IncomingMessages = MemoryObjectSendStream[SessionMessage | Exception]
_OutgoingMessages = MemoryObjectReceiveStream[SessionMessage]


@asynccontextmanager
async def open_stdio_streams(
    command: str, args: Sequence[str], env: Mapping[str, str]
) -> AsyncGenerator[SessionStreams]:
    """Start the process with a minimal environment and `env`; on exit, end it and all that it started.

    The SDK's own client buffers lines of any length. Raises OSError where the process cannot be started.
    """
    process = await start_process(
        (command, *args),
        stdin=PIPE,
        stdout=PIPE,
        env={**get_default_environment(), **env},
        own_session=True,
        limit=MAX_MESSAGE_BYTES,
    )
    try:
        read_in, read_out = anyio.create_memory_object_stream[SessionMessage | Exception]()
        write_in, write_out = anyio.create_memory_object_stream[SessionMessage]()
        async with read_in, read_out, write_in, write_out, anyio.create_task_group() as tasks:
            tasks.start_soon(_read_messages, process, read_in)
            tasks.start_soon(_write_messages, process, write_out)
            yield read_out, write_in
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end_process(process)


async def _read_messages(process: Process, messages: _IncomingMessages) -> None:
    assert process.stdout is not None, "started with a pipe"
    async with messages:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while line := await _read_line(process.stdout):
                text = cut_deep_values(line.decode(errors="replace"))
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
                except ValidationError as exc:
                    await messages.send(exc)
                else:
                    await messages.send(message)


async def _read_line(stdout: asyncio.StreamReader) -> bytes:
    """Return the next line, or no bytes at the end and for a line above MAX_MESSAGE_BYTES."""
    try:
        return await stdout.readline()
    except ValueError:
        CURRENT_EXCHANGE.get().failure = f"The MCP server sent more than {MAX_MESSAGE_BYTES} bytes at once."
        return b""


async def _write_messages(process: Process, messages: _OutgoingMessages) -> None:
    assert process.stdin is not None, "started with a pipe"
    async with messages:
        with suppress(OSError):
            async for outgoing in messages:
                line = outgoing.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()


async def _end_process(process: Process) -> None:
    """End the process in MCP's order: close its input, then SIGTERM, then SIGKILL, also for processes it started."""
    assert process.stdin is not None, "started with a pipe"
    process.stdin.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_drain_output, process)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if not await _wait_for_exit(process):
                _signal_process_group(process, signal_number)
        await _wait_for_exit(process)
        _signal_process_group(process, signal.SIGKILL)
        tasks.cancel_scope.cancel()
    await process.end()


async def _drain_output(process: Process) -> None:
    """Read the output to its end: a process that waits to write would not notice the end of its input."""
    assert process.stdout is not None, "started with a pipe"
    while await process.stdout.read(MAX_MESSAGE_BYTES):
        pass


async def _wait_for_exit(process: Process) -> bool:
    with anyio.move_on_after(_EXIT_TIMEOUT_S):
        await process.wait()
        return True
    return False


def _signal_process_group(process: Process, signal_number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)
