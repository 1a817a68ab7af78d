"""Processes in a sandbox that run code within limits, keep its files, and are stopped between calls."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from apis.confinement.commands import CommandEvent
from apis.skills.bundle import SkillFile
from providers.tool_runtime.python.commands import (
    BoundCommand,
    CommandParts,
    GuestMessage,
    parse_written_files,
)
from providers.tool_runtime.python.egress.hand_over import HandOver
from providers.tool_runtime.python.egress.proxy import ContainerProxy
from providers.tool_runtime.python.files import (
    MAX_FILES,
    MAX_FILES_BYTES,
    parse_returned_files,
)
from providers.tool_runtime.python.guest_channel import GuestChannel, PartHandler, new_token
from providers.tool_runtime.python.guest_folder import GuestFolder
from providers.tool_runtime.python.outcomes import (
    CommandsOutcome,
    RunOutcome,
    SessionEnded,
    describe_exit,
    describe_exit_code,
)
from providers.tool_runtime.python.output import ProgramOutput
from providers.tool_runtime.python.processes import process_tree, wait_for_exit
from providers.tool_runtime.python.sandbox import Sandbox, SandboxLimits
from providers.tool_runtime.python.session_processes import SessionProcesses

_log = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 10.0
_FILES_TIMEOUT_S: Final = 10.0
_COMMANDS_GRACE_S: Final = 5.0
"""Seconds after the time limit of commands in which the guest itself ends them, so that the session goes on."""
_KILL_TIMEOUT_S: Final = 5.0
_PIPE_BYTES: Final = 64 * 1024
_MAX_DRAIN_READS: Final = 64
_END_TIMEOUT_S: Final = 5.0
"""Seconds in which the first process ends the programs when it is asked; one that does not is ended with its files."""
_PROGRAM_REQUESTS: Final = ("run", "shell")

_Message = tuple[GuestMessage, bytes, PartHandler | None]
"""A request, its payload, and the function that takes the parts before its reply."""
_Exchanged = tuple[dict[str, Any], bytes, SessionEnded | None]
"""A reply, its payload, and the limit that was exceeded: the programs have been ended then."""


class PythonSession:
    """Running guest, for one task that runs code, or for several that run commands and use files. It has ended once
    SessionEnded was raised.

    Its first process keeps the files. Programs that end, by themselves or at a limit, leave it running.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, channel: GuestChannel, sandbox: Sandbox, limits: SandboxLimits
    ) -> None:
        self._process = process
        self._channel = channel
        self._is_isolated = sandbox.is_isolated
        self._limits = limits
        self._folder = ""
        self.folder = GuestFolder(self._request_files)
        self._processes = SessionProcesses(process.pid, limits, is_isolated=sandbox.is_isolated)
        self._signals = asyncio.Condition()
        """Its holder resumes or stops the processes."""
        self._exchange_count = 0
        self._watch: asyncio.Task[SessionEnded | None] | None = None
        """Watches the limits while exchanges are in progress, and ends with the one that was exceeded."""
        self._output = ProgramOutput(limits.output_bytes)
        self.proxy: ContainerProxy | None = None
        """The session's way out; None where it has none."""
        self._own_variables: frozenset[str] = frozenset()
        """The names of a workspace's variables, which go before those of secrets."""
        self._output_pipe = -1
        self._was_killed = False
        self._end_task = asyncio.ensure_future(self._wait_for_end())

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        limits: SandboxLimits,
        skill_files: Sequence[SkillFile] = (),
        proxy: ContainerProxy | None = None,
        workspace: Mapping[str, str] | None = None,
    ) -> "PythonSession":
        """Start a guest, whose only way out is the `proxy`, which ends with it; for a `workspace` with these variables.
        Raise SessionEnded, with the sandbox's output, when none answers within 10 s."""
        with contextlib.ExitStack() as opened:
            handover = HandOver(opened, proxy) if proxy is not None else None
            is_workspace = workspace is not None
            session, hello = await cls._launch(sandbox, limits, skill_files, handover, is_workspace=is_workspace)
            hello = {**hello, "environment": workspace or {}}
            session._own_variables = frozenset(workspace or ())
            try:
                await session._channel.connect()
                await session._exchange_messages(hello, b"", _START_TIMEOUT_S)
                await asyncio.to_thread(session._processes.adopt, session._folder)
                if handover is not None:
                    handover.serve()
                    session.proxy = proxy
            except SessionEnded as exc:
                raise SessionEnded(f"{exc}: {session._output.text().strip()[:500]}") from exc
            except BaseException:
                await session.kill()
                raise
        return session

    @classmethod
    async def _launch(
        cls,
        sandbox: Sandbox,
        limits: SandboxLimits,
        skill_files: Sequence[SkillFile],
        handover: HandOver | None,
        *,
        is_workspace: bool,
    ) -> "tuple[PythonSession, GuestMessage]":
        """Return the session of a new process, and the first message that it waits for."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            access = handover and handover.access
            with sandbox.launch(theirs.fileno(), limits, skill_files, access, is_workspace=is_workspace) as launch:
                process = await asyncio.create_subprocess_exec(
                    *launch.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    env={},
                    pass_fds=launch.pass_fds,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        session = cls(process, GuestChannel(ours), sandbox, limits)
        session._folder = launch.folder
        session._start_reading(reading)
        hello: GuestMessage = {"folder": launch.folder, "rlimits": launch.rlimits}
        return session, hello if handover is None else {**hello, "network": handover.message}

    @property
    def pid(self) -> int:
        """Number of the outermost process."""
        return self._process.pid

    @property
    def has_cgroup(self) -> bool:
        """True when a control group bounds the memory and the processes exactly, not only when they are measured."""
        return self._processes.has_cgroup

    @property
    def has_ended(self) -> bool:
        """True when the process has ended or is ending."""
        return self._was_killed or self._end_task.done()

    async def run(self, code: str) -> RunOutcome:
        """Run code to its end and return its output and the files that it created or changed."""
        self._output = ProgramOutput(self._limits.output_bytes)
        request = {"do": "run", "code": code, "max_files": MAX_FILES, "max_bytes": MAX_FILES_BYTES}
        try:
            reply, data, end = await self._exchange_messages(request, b"", self._limits.wall_s)
        except SessionEnded as exc:
            return RunOutcome(self._output.text(), exc.exit_status, str(exc), are_files_lost=True)
        self._drain_output()
        end = end or self._find_program_end(reply)
        exit_status = end.exit_status if end else "exception" if reply.get("exit") == "exception" else "ok"
        loss_reason = describe_exit(lost) if isinstance(lost := reply.get("lost"), int) else ""
        files, skipped = parse_returned_files(reply, data)
        text = self._output.text()
        return RunOutcome(text, exit_status, str(end or ""), files, skipped, loss_reason=loss_reason)

    async def run_commands(
        self, commands: Sequence[BoundCommand], on_event: Callable[[CommandEvent], None]
    ) -> CommandsOutcome:
        """Run shell commands at the same time; `on_event` is called with what they write, and with the end of each."""
        self._output = ProgramOutput(self._limits.output_bytes)
        parts = CommandParts(commands, on_event)
        wall_s = max(each.timeout_s for each in commands) + _COMMANDS_GRACE_S
        try:
            variables: Mapping[str, str] = self.proxy.access.secrets.variables() if self.proxy is not None else {}
            environment = {name: text for name, text in variables.items() if name not in self._own_variables}
            request: GuestMessage = {
                "do": "shell",
                "commands": [asdict(each) for each in commands],
                "environment": environment,
            }
            reply, _, end = await self._exchange_messages(request, b"", wall_s, parts.feed)
        except SessionEnded as exc:
            parts.end_all(
                f"the container's programs were ended: {exc}. Its files are gone",
                is_timed_out=exc.exit_status == "timed_out",
            )
            return CommandsOutcome(reason=str(exc), are_files_lost=True)
        note = f"the container's programs were ended: {end}" if end else "the command did not report its end"
        parts.end_all(note, is_timed_out=end is not None and end.exit_status == "timed_out")
        return CommandsOutcome(parse_written_files(reply), str(end or ""))

    async def kill(self) -> None:
        """End every process of the session and wait for that, at most 5 s. Harmless the second time."""
        self._begin_kill()
        await asyncio.wait([self._end_task], timeout=_KILL_TIMEOUT_S)
        if not self._end_task.done():
            self._process.kill()
            await asyncio.wait([self._end_task], timeout=_KILL_TIMEOUT_S)

    async def _request_files(
        self, request: GuestMessage, payload: bytes, on_part: PartHandler | None
    ) -> tuple[dict[str, Any], bytes]:
        wall_s = max(_FILES_TIMEOUT_S, self._limits.wall_s)
        reply, data, _ = await self._exchange_messages(request, payload, wall_s, on_part)
        return reply, data

    async def _exchange_messages(
        self,
        request: GuestMessage,
        payload: bytes,
        wall_s: float,
        on_part: PartHandler | None = None,
    ) -> _Exchanged:
        """Send one request and return its reply. `on_part` is called with the parts before it, and raises ValueError
        for a wrong one. Where there is no reply, all processes of the session are ended. A caller that is cancelled has
        to wait until programs have been ended: the files stay."""
        cancelled = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._exchange_within_limits((request, payload, on_part), wall_s, cancelled))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if request.get("do") in _PROGRAM_REQUESTS:
                cancelled.set_result(None)
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # without this, asyncio logs it as never retrieved
            raise

    async def _exchange_within_limits(
        self, message: _Message, wall_s: float, cancelled: "asyncio.Future[None]"
    ) -> _Exchanged:
        request, payload, on_part = message
        token, end = new_token(), None
        try:
            watch = await self._begin_exchange(with_programs=request.get("do") in _PROGRAM_REQUESTS)
            try:
                exchange = asyncio.ensure_future(self._channel.exchange(request, payload, on_part, token))
                try:
                    events = (exchange, watch, cancelled)
                    await asyncio.wait(events, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
                    if not exchange.done():
                        end = await self._find_end(watch, cancelled, wall_s)
                        await self._end_programs(exchange, {"do": "kill"} if watch.done() else _stop(token))
                        if not exchange.done():
                            raise end
                    reply, data = exchange.result()
                finally:
                    exchange.cancel()
                    await asyncio.wait([exchange])
                if end is None and watch.done() and reply.get("exit") == "ended":  # another call has asked for that
                    end = watch.result()
            finally:
                fork_end = await self._finish_exchange(watch)
            end = end or fork_end
            if end is not None:
                _log.debug("the programs of a Python session were ended: %s", end)
            return reply, data, end
        except (EOFError, OSError):
            raise await self._diagnose_end() from None
        except BaseException:
            await self.kill()
            self._drain_output()
            raise

    async def _begin_exchange(self, *, with_programs: bool) -> "asyncio.Task[SessionEnded | None]":
        """Let the processes run, and return the watch of their limits, which all exchanges in progress share. Wait for
        the end of those where one was exceeded."""
        async with self._signals:
            await self._signals.wait_for(lambda: self._watch is None or not self._watch.done())
            is_first = self._watch is None
            await asyncio.to_thread(self._processes.resume, with_programs=with_programs, is_first=is_first)
            if self._watch is None:
                self._watch = asyncio.ensure_future(self._processes.watch(self._end_task))
            self._exchange_count += 1
            return self._watch

    async def _finish_exchange(self, watch: "asyncio.Task[SessionEnded | None]") -> SessionEnded | None:
        """Stop the processes after the last exchange in progress. Programs that fork faster than they are stopped are
        ended, for the reason that is returned."""
        async with self._signals:
            self._exchange_count -= 1
            if self._exchange_count:
                return None
            watch.cancel()
            await asyncio.wait([watch])
            try:
                return None if self.has_ended else await self._stop_processes()
            finally:
                self._watch = None
                self._signals.notify_all()

    async def _find_end(
        self, watch: "asyncio.Task[SessionEnded | None]", cancelled: "asyncio.Future[None]", wall_s: float
    ) -> SessionEnded:
        """Return why an exchange is to end that has no reply yet."""
        if watch.done():
            return watch.result() or await self._diagnose_end()
        if cancelled.done():
            return SessionEnded("its call was cancelled")
        return SessionEnded(f"it ran for more than {wall_s:g} s", "timed_out")

    async def _end_programs(
        self, exchange: "asyncio.Future[tuple[dict[str, Any], bytes]]", request: GuestMessage
    ) -> None:
        """Ask for the end of programs, and wait for the reply to their request."""
        if not self.has_ended:
            self._channel.send(request)
            await asyncio.wait([exchange], timeout=_END_TIMEOUT_S)

    async def _stop_processes(self) -> SessionEnded | None:
        """Stop all processes until the next request. Programs that fork faster than they are stopped are ended."""
        if await asyncio.to_thread(self._processes.stop):
            return None
        end = SessionEnded("its processes could not be stopped")
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._channel.exchange({"do": "end"}, b"", None)
        except TimeoutError:
            raise end from None
        return end

    def _find_program_end(self, reply: dict[str, Any]) -> SessionEnded | None:
        """Return how the process of a program has ended by itself; None where it has not."""
        if reply.get("exit") != "ended":
            return None
        if self._processes.has_memory_kills:
            return self._processes.memory_limit_error()
        status = reply.get("status")
        return SessionEnded(
            describe_exit(status) if isinstance(status, int) else "it closed its connection to the tool"
        )

    async def _diagnose_end(self) -> SessionEnded:
        """Return how a process ended by itself. One that only closed its connection is ended now."""
        await asyncio.wait([self._end_task], timeout=1)
        status = self._process.returncode
        await self.kill()
        self._drain_output()
        if status is None:
            return SessionEnded("it closed its connection to the tool")
        if self._processes.ran_out_of_memory:
            return self._processes.memory_limit_error()
        return SessionEnded(describe_exit_code(128 - status if status > 128 else status))

    def _start_reading(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._output_pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._read_output)

    def _read_output(self) -> bool:
        """Read once; return False when there was nothing to read."""
        if self._output_pipe == -1:
            return False
        try:
            data = os.read(self._output_pipe, _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._output_pipe)
        self._output.feed(data)
        return bool(data)

    def _drain_output(self) -> None:
        """Read the output from before the reply; bounded, since a process may go on printing."""
        for _ in range(_MAX_DRAIN_READS):
            if not self._read_output():
                return

    def _begin_kill(self) -> None:
        """Signal all processes to end. With the first one of a namespace, the kernel ends all others in it."""
        if self.has_ended:
            return
        self._was_killed = True
        with contextlib.suppress(ProcessLookupError):
            if self._processes.inner_pidfd is not None:
                signal.pidfd_send_signal(self._processes.inner_pidfd, signal.SIGKILL)
            elif self._is_isolated:
                self._process.kill()
            else:  # each leads a group of its own, or is in one
                for pid in reversed(process_tree(self.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(os.getpgid(pid), signal.SIGKILL)

    async def _wait_for_end(self) -> None:
        """Wait for the process to end and release its resources."""
        await self._process.wait()
        self._drain_output()
        if self._output_pipe != -1:
            asyncio.get_running_loop().remove_reader(self._output_pipe)
            os.close(self._output_pipe)
            self._output_pipe = -1
        self._channel.close()
        if (inner_pidfd := self._processes.inner_pidfd) is not None:
            # It outlives the outermost process for a moment when that one was killed.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(inner_pidfd, signal.SIGKILL)
            await wait_for_exit(inner_pidfd, _KILL_TIMEOUT_S)
            # Its zombie is reparented to this process when that is the first process of its container.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, inner_pidfd, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not wait
            os.close(inner_pidfd)
            self._processes.inner_pidfd = None
        if self.proxy is not None:
            await self.proxy.close()
        await asyncio.to_thread(self._remove_resources)

    def _remove_resources(self) -> None:
        self._processes.remove_group()
        if not self._is_isolated:
            shutil.rmtree(self._folder, ignore_errors=True)


def _stop(token: str) -> GuestMessage:
    """Return the message that ends the programs of one call alone."""
    return {"do": "stop", "call": token}
