"""Starts the processes of a server: one, several workers on one port, or one that restarts when its files change."""

import asyncio
import gc
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.synchronize
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

import uvloop
from uvicorn.config import Config
from uvicorn.supervisors.statreload import StatReload

from apis.errors import ConfigError
from apis.imports import import_from_string
from stack.build import align_lines, confinement_lines, machine_lines
from stack.config import StackConfig, find_config, load_config
from stack.http.metrics import forget_worker, share_metrics
from stack.serving.exit_codes import exit_on_error
from stack.serving.heartbeats import Heartbeats
from stack.serving.listener import bind_listener, listener_url
from stack.serving.serve import handle_hangup, has_lost_parent, serve, set_up_logging
from stack.wiring import load_wired_config, wiring_lines

_POLL_S = 0.2
_RESTART_INTERVAL_S = 1.0
# Longest pause between starts of workers that all end before they listen, as with a mistake in a changed run config.
_MAX_RESTART_INTERVAL_S = 60.0
# Seconds without one turn of its event loop after which a worker is killed and replaced: its clients wait in vain.
_SILENCE_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)
# A forked worker starts at once and shares the memory of the imports; elsewhere than on Linux, libraries of the system
# may not survive a fork.
_context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The run config by path or name, fields that override its `server` section, the app's factory, models that replace
    those of its inference section, and the paths of parts that are left out of it, each with the reason."""

    file: str
    server: Mapping[str, object] = field(default_factory=dict[str, object])
    app: str = "stack.http.app:create_app"
    models: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def load(self) -> StackConfig:
        """Return the run config. Raises ConfigError."""
        return load_config(self.file, server=self.server, models=self.models, left_out=self.left_out)


def run(launch: LaunchOptions, *, workers: int = 1, reload: bool = False) -> int:
    """Serve until a signal ends it; return the exit code. The wiring and then the URL are printed to stdout.

    Raises ConfigError, or StackError where a service that the stack needs cannot be reached.
    """
    config, specs = load_wired_config(launch.file, server=launch.server, models=launch.models, left_out=launch.left_out)
    if workers > 1 and config.kv_store.provider == "memory":
        raise ConfigError(
            f"{config.source}: kv_store.provider: memory is of one process, and {workers} workers need to share "
            "one store. Choose sqlite, redis or postgres, or run one worker."
        )
    left_out = {f"no {path}": reason for path, reason in launch.left_out.items()}
    _print_lines(*wiring_lines(specs), *(align_lines(left_out) if left_out else ()))
    listener = bind_listener(config.server)
    set_up_logging(config.server.log_level)
    if reload or workers > 1:
        gc.enable()
    if reload:
        _Reloader(replace(launch, server={**launch.server, "grace_period_s": 1.0}), listener).run()
        return 0
    if workers > 1:
        with tempfile.TemporaryDirectory(prefix="stack-metrics-") as metrics_directory:
            return _WorkerPool(launch, listener, workers, Path(metrics_directory)).run()
    _serve(launch, listener)
    return 0


def _print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class _SharedState:
    """State that all workers of one port share.

    `listening_event` is set when one of them listens, `ending_event` when all of them are about to end; `heartbeats`
    has a time for each.
    """

    listening_event: multiprocessing.synchronize.Event
    ending_event: multiprocessing.synchronize.Event
    metrics_directory: Path
    heartbeats: Heartbeats

    def others_keep_serving(self) -> bool:
        """Return true if a worker that drains now drains alone."""
        return not has_lost_parent() and not self.ending_event.is_set()


def build_try_line(config: StackConfig, url: str) -> str:
    """Return the line that shows a first request, with a key where the server needs one."""
    key = "OPENAI_API_KEY=YOUR_KEY " if config.requires_keys else ""
    return f"try it: {key}stack ask --url {url}/v1 'Say hello.'"


def _serve(
    launch: LaunchOptions, listener: socket.socket, shared_state: _SharedState | None = None, number: int = 0
) -> None:
    config = launch.load()
    app = import_from_string(launch.app)(config)

    def announce() -> None:
        if shared_state is None or not shared_state.listening_event.is_set():
            url = listener_url(listener)
            services = getattr(app.state, "services", None)
            lines = [*confinement_lines(services.stack), *machine_lines(services.stack)] if services else []
            _print_lines(*lines, f"listening on {url}", build_try_line(config, url))
        if shared_state is not None:
            shared_state.listening_event.set()

    def beat() -> None:
        if shared_state is not None:
            shared_state.heartbeats.beat(number)

    is_alone = shared_state.others_keep_serving if shared_state is not None else lambda: False
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(app, config.server, listener, announce, is_alone, beat))


def _run_worker(
    launch: LaunchOptions,
    sockets: list[socket.socket] | None,
    shared_state: _SharedState | None = None,
    number: int = 0,
) -> None:
    """Serve in a child process; `number` is that of the worker among those of `shared_state`."""
    assert sockets  # uvicorn's own servers take None, ours do not
    # A terminal sends its Ctrl-C to the whole group; the parent alone decides what becomes of it.
    os.setpgrp()
    _reset_signals()
    with exit_on_error():
        set_up_logging(launch.load().server.log_level)
        if shared_state is not None:
            share_metrics(shared_state.metrics_directory, number)
        _serve(launch, sockets[0], shared_state, number)


@contextmanager
def _delayed_signals() -> Generator[None]:
    """Deliver the signals that end a process after the block. A process that is started in it receives them only after
    it has called `_reset_signals`: before, it would have the handlers of its parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def _reset_signals() -> None:
    for number in _ENDING_SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


class _WorkerPool:
    """Keeps `count` processes serving one port: another for each that dies, none after a signal.

    A signal is passed on: the first asks all workers to drain, the second to stop at once. If a worker fails before any
    has listened, all would; then that one's exit code is the result. A signal to one worker alone ends that one when
    it has drained, and the others serve meanwhile: so all can be restarted with no request failing. A worker whose
    event loop stands still for `_SILENCE_TIMEOUT_S`, for one because it was stopped, is killed. A worker takes over the
    number of the one that it replaces, and with it the counts in `metrics_directory`.
    """

    def __init__(self, launch: LaunchOptions, listener: socket.socket, count: int, metrics_directory: Path) -> None:
        self._shared_state = _SharedState(
            _context.Event(), _context.Event(), metrics_directory, Heartbeats(_context, count)
        )
        self._arguments = (launch, [listener], self._shared_state)
        self._listener = listener
        self._count = count
        self._workers: dict[int, multiprocessing.process.BaseProcess] = {}
        self._restart_interval_s = _RESTART_INTERVAL_S
        self._signal_count = 0
        self._first_signal = signal.SIGTERM

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if _context.get_start_method() == "fork":
            import_from_string(self._arguments[0].app)
            gc.collect()
            gc.freeze()  # what the workers share is not written to by their collections
        with handle_hangup(self._on_signal):
            return self._supervise()

    def _supervise(self) -> int:
        code = 0
        passed_on = 0
        started_at = 0.0
        while True:
            missing = set(range(self._count)) - self._workers.keys()
            if not self._signal_count and missing and time.monotonic() - started_at >= self._restart_interval_s:
                started_at = time.monotonic()
                for number in sorted(missing):
                    self._start_worker(number)
            if passed_on < self._signal_count:
                passed_on += 1
                self._shared_state.ending_event.set()
                self._listener.close()  # else the port would stay open after the last worker has closed it
                for worker in self._workers.values():
                    _pass_on(worker, self._first_signal)
            wait([worker.sentinel for worker in self._workers.values()], timeout=_POLL_S)
            for number, worker in [*self._workers.items()]:
                if not worker.is_alive():
                    del self._workers[number]
                    code = code or self._check_worker_exit(worker, number)
                elif self._shared_state.heartbeats.observe(number) > _SILENCE_TIMEOUT_S:
                    _log.error("Worker %s did nothing for %g s, and is killed.", worker.pid, _SILENCE_TIMEOUT_S)
                    worker.kill()  # a stopped process receives no other signal
            if self._signal_count and not self._workers:
                return code

    def _start_worker(self, number: int) -> None:
        worker = _context.Process(target=_run_worker, args=(*self._arguments, number), name="stack-worker")
        self._shared_state.heartbeats.reset(number)
        with _delayed_signals():
            worker.start()
        self._workers[number] = worker

    def _check_worker_exit(self, worker: multiprocessing.process.BaseProcess, number: int) -> int:
        """Return the exit code that a worker's end means for the pool; a failure to start ends the pool."""
        if self._signal_count:
            return 0
        if worker.exitcode and worker.exitcode > 0 and not self._shared_state.listening_event.is_set():
            self._signal_count = 1
            return worker.exitcode
        if self._shared_state.heartbeats.has_begun(number):
            self._restart_interval_s = _RESTART_INTERVAL_S
        else:
            self._restart_interval_s = min(_MAX_RESTART_INTERVAL_S, 2 * self._restart_interval_s)
        say = _log.error if worker.exitcode else _log.info
        say(
            "Worker %s ended (exit code %s); another takes its place in %g s at most.",
            worker.pid,
            worker.exitcode,
            self._restart_interval_s,
        )
        forget_worker(self._shared_state.metrics_directory, number)
        return 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._signal_count:
            self._first_signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._signal_count += 1


def _pass_on(worker: multiprocessing.process.BaseProcess, number: signal.Signals) -> None:
    if number == signal.SIGTERM or worker.pid is None:
        worker.terminate()
    elif worker.is_alive():
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


class _Reloader(StatReload):
    """One child process, restarted when the run config or a Python file below the working directory changes."""

    def __init__(self, launch: LaunchOptions, listener: socket.socket) -> None:
        config = Config(launch.app, reload=True, log_config=None)
        super().__init__(config, partial(_run_worker, launch), [listener])
        self._config_path = find_config(launch.file)

    def iter_py_files(self) -> Iterator[Path]:
        yield self._config_path.resolve()
        for folder in self.config.reload_dirs:
            yield from find_python_files(folder)


def find_python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below the folder, without those of hidden folders and of virtual environments: packages
    are tens of thousands of files, and the reloader looks at each file four times a second."""
    for parent, folders, files in os.walk(folder.resolve()):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(parent, name) for name in files if name.endswith(".py"))
