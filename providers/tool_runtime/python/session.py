"""Processes in a sandbox that run code within limits, keep its files, and are stopped between calls."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from apis.confinement.commands import CommandEvent
from apis.skills.bundle import SkillFile
from providers.tool_runtime.python.cgroup import Cgroup
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
from providers.tool_runtime.python.guest_channel import GuestChannel, PartHandler
from providers.tool_runtime.python.guest_folder import GuestFolder
from providers.tool_runtime.python.outcomes import (
    CommandsOutcome,
    RunOutcome,
    SessionEnded,
    describe_exit,
    describe_exit_code,
)
from providers.tool_runtime.python.output import ProgramOutput
from providers.tool_runtime.python.processes import (
    ProcessUsage,
    measure_socket_bytes,
    measure_usage,
    process_tree,
    resume_descendants,
    send_signal,
    stop_descendants,
    wait_for_exit,
)
from providers.tool_runtime.python.sandbox import MAX_INODES, MIB, WORKSPACE_FOLDER, Sandbox, SandboxLimits

_log = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 10.0
_FILES_TIMEOUT_S: Final = 10.0
_COMMANDS_GRACE_S: Final = 5.0
"""Seconds after the time limit of commands in which the guest itself ends them, so that the session goes on."""
_WATCH_INTERVAL_S: Final = 0.1
_CLOSE_WATCH_INTERVAL_S: Final = 0.02
"""Seconds between measurements where no control group holds the memory and half of it is used."""
_KILL_TIMEOUT_S: Final = 5.0
_PIPE_BYTES: Final = 64 * 1024
_MAX_DRAIN_READS: Final = 64
_END_TIMEOUT_S: Final = 5.0
"""Seconds in which the first process ends the programs when it is asked; one that does not is ended with its files."""
_PROGRAM_REQUESTS: Final = ("run", "shell")
_FIRST_PROCESSES: Final = 1
_PROTECTED_SCORE: Final = "-900"


@dataclass(frozen=True, slots=True)
class _UsageBefore:
    """Usage of a session when an exchange of messages began."""

    cpu_s: float
    memory_kills: int
    inodes: int


_Message = tuple[GuestMessage, bytes, PartHandler | None]
"""A request, its payload, and the function that takes the parts before its reply."""
_Exchanged = tuple[dict[str, Any], bytes, SessionEnded | None]
"""A reply, its payload, and the limit that was exceeded: the programs have been ended then."""


class PythonSession:
    """Running guest, for one task at a time (except `kill`). It has ended once SessionEnded was raised.

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
        self._cgroup: Cgroup | None = None
        self._output = ProgramOutput(limits.output_bytes)
        self.proxy: ContainerProxy | None = None
        """The session's way out; None where it has none."""
        self._own_variables: frozenset[str] = frozenset()
        """The names of a workspace's variables, which go before those of secrets."""
        self._output_pipe = -1
        self._was_killed = False
        self._inner_pid = 0
        self._inner_pidfd: int | None = None
        self._memory_kills = 0
        self._ran_out_of_memory = False
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
                await asyncio.to_thread(session._move_into_cgroup)
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
        return self._cgroup is not None

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
        try:
            before = await asyncio.to_thread(
                self._resume_processes, with_programs=message[0].get("do") in _PROGRAM_REQUESTS
            )
            self._memory_kills = before.memory_kills
            exchange = asyncio.ensure_future(self._channel.exchange(*message))
            watch = asyncio.ensure_future(self._watch_limits(before, wall_s, cancelled))
            end: SessionEnded | None = None
            try:
                await asyncio.wait([exchange, watch], return_when=asyncio.FIRST_COMPLETED)
                if not exchange.done():
                    end = watch.result()
                    await self._end_programs(exchange)
                    if not exchange.done():
                        raise end
                reply, data = exchange.result()
            finally:
                exchange.cancel()
                watch.cancel()
                await asyncio.wait([exchange, watch])
            end = await self._stop_processes() or end
            if end is not None:
                _log.debug("the programs of a Python session were ended: %s", end)
            return reply, data, end
        except (EOFError, OSError):
            raise await self._diagnose_end() from None
        except BaseException:
            await self.kill()
            self._drain_output()
            raise

    async def _end_programs(self, exchange: "asyncio.Future[tuple[dict[str, Any], bytes]]") -> None:
        """End all programs, and wait for the reply to their request."""
        if not self.has_ended:
            self._channel.send({"do": "kill"})
            await asyncio.wait([exchange], timeout=_END_TIMEOUT_S)

    async def _stop_processes(self) -> SessionEnded | None:
        """Stop all processes until the next request. Programs that fork faster than they are stopped are ended."""
        if await asyncio.to_thread(stop_descendants, self.pid):
            return None
        end = SessionEnded("its processes could not be stopped")
        await asyncio.to_thread(resume_descendants, self.pid)
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._channel.exchange({"do": "end"}, b"", None)
        except TimeoutError:
            raise end from None
        return end

    async def _watch_limits(
        self, before: _UsageBefore, wall_s: float, cancelled: "asyncio.Future[None]"
    ) -> SessionEnded:
        """Return which limit was exceeded as soon as one is, or that the call was `cancelled`, or how the first process
        has ended."""
        until = asyncio.get_running_loop().time() + wall_s
        limits, interval_s = self._limits, _WATCH_INTERVAL_S
        while True:
            remaining_s = until - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                return SessionEnded(f"it ran for more than {wall_s:g} s", "timed_out")
            waited = [self._end_task, cancelled]
            await asyncio.wait(waited, timeout=min(interval_s, remaining_s), return_when=asyncio.FIRST_COMPLETED)
            if self._end_task.done():
                return await self._diagnose_end()
            if cancelled.done():
                return SessionEnded("its call was cancelled")
            usage, inodes = await asyncio.to_thread(self._measure_usage)
            if usage.cpu_s - before.cpu_s > limits.cpu_s:
                return SessionEnded(f"it used more than {limits.cpu_s:g} s of processor time", "cpu_limit")
            if usage.memory_bytes > limits.memory_bytes or self._count_memory_kills() > before.memory_kills:
                return self._memory_limit_error()
            is_close = not self.has_cgroup and usage.memory_bytes > limits.memory_bytes // 2
            interval_s = _CLOSE_WATCH_INTERVAL_S if is_close else _WATCH_INTERVAL_S
            if inodes > max(MAX_INODES, before.inodes):  # a program may remove what another has made
                return SessionEnded(f"it made more than {MAX_INODES} files", "files_limit")

    def _memory_limit_error(self) -> SessionEnded:
        return SessionEnded(f"it used more than {self._limits.memory_bytes // MIB} MiB of memory", "memory_limit")

    def _find_program_end(self, reply: dict[str, Any]) -> SessionEnded | None:
        """Return how the process of a program has ended by itself; None where it has not."""
        if reply.get("exit") != "ended":
            return None
        if self._count_memory_kills() > self._memory_kills:
            return self._memory_limit_error()
        status = reply.get("status")
        return SessionEnded(
            describe_exit(status) if isinstance(status, int) else "it closed its connection to the tool"
        )

    def _count_memory_kills(self) -> int:
        return self._cgroup.count_memory_kills() if self._cgroup is not None else 0

    async def _diagnose_end(self) -> SessionEnded:
        """Return how a process ended by itself. One that only closed its connection is ended now."""
        await asyncio.wait([self._end_task], timeout=1)
        status = self._process.returncode
        await self.kill()
        self._drain_output()
        if status is None:
            return SessionEnded("it closed its connection to the tool")
        if self._ran_out_of_memory:
            return self._memory_limit_error()
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

    def _move_into_cgroup(self) -> None:
        """Put the guest, which has not run any program yet, into a control group, and open what `kill` needs."""
        pids = process_tree(self.pid)
        if self._is_isolated:
            self._inner_pid = pids[1]
            self._inner_pidfd = os.pidfd_open(self._inner_pid)
            with contextlib.suppress(OSError):  # only root may: then the kernel ends programs before the first process
                Path(f"/proc/{self._inner_pid}/oom_score_adj").write_text(_PROTECTED_SCORE)
            self._cgroup = Cgroup.create(self._limits.memory_bytes, self._limits.processes + _FIRST_PROCESSES)
            if self._cgroup is not None and not self._cgroup.add_processes(pids[1:]):
                self._cgroup.remove()
                self._cgroup = None

    def _resume_processes(self, *, with_programs: bool) -> _UsageBefore:
        """Resume the processes, which were stopped after the last call, or the first one alone; return their usage."""
        if with_programs:
            resume_descendants(self.pid)
        elif self._inner_pid:
            send_signal(self._inner_pid, self.pid, signal.SIGCONT)
        usage, inodes = self._measure_usage()
        return _UsageBefore(usage.cpu_s, self._count_memory_kills(), inodes)

    def _measure_usage(self) -> tuple[ProcessUsage, int]:
        """Return the usage of the processes and the number of files in the scratch folder. A control group counts what
        sockets hold; where there is none, their number bounds it."""
        usage, inodes = measure_usage(self.pid, self._limits.memory_bytes), 0
        if self._inner_pid and not self.has_cgroup:
            usage = replace(usage, memory_bytes=usage.memory_bytes + measure_socket_bytes(self._inner_pid))
        with contextlib.suppress(OSError):
            if self._inner_pid:
                folder = self._folder if self._folder == WORKSPACE_FOLDER else "/mnt"
                status = os.statvfs(f"/proc/{self._inner_pid}/root{folder}")
                inodes = status.f_files - status.f_ffree
        return usage, inodes

    def _begin_kill(self) -> None:
        """Signal all processes to end. With the first one of a namespace, the kernel ends all others in it."""
        if self.has_ended:
            return
        self._was_killed = True
        with contextlib.suppress(ProcessLookupError):
            if self._inner_pidfd is not None:
                signal.pidfd_send_signal(self._inner_pidfd, signal.SIGKILL)
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
        if self._inner_pidfd is not None:
            # It outlives the outermost process for a moment when that one was killed.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner_pidfd, signal.SIGKILL)
            await wait_for_exit(self._inner_pidfd, _KILL_TIMEOUT_S)
            # Its zombie is reparented to this process when that is the first process of its container.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._inner_pidfd, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not wait
            os.close(self._inner_pidfd)
            self._inner_pidfd = None
        if self.proxy is not None:
            await self.proxy.close()
        await asyncio.to_thread(self._remove_resources)

    def _remove_resources(self) -> None:
        if self._cgroup is not None:
            self._ran_out_of_memory = self._count_memory_kills() > self._memory_kills
            self._cgroup.remove()
        if not self._is_isolated:
            shutil.rmtree(self._folder, ignore_errors=True)
