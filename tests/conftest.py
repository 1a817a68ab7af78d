"""Settings of every test: Triton's kernels run in its interpreter, and nothing blocks the event loop."""

import fcntl
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs] - typed, without the marker file

os.environ.setdefault("TRITON_INTERPRET", "1")
# an example that waits for a busy machine is not wrong
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

MAY_BLOCK: Final = (
    # while the stack starts, nothing else waits for the event loop
    ("stack/build.py", ("open_stack",)),
    ("stack/telemetry/setup.py", ("_build_providers",)),
    ("provider.py", ("start",)),
    # once for each connection, in the stores' own clients: the version of a package, the place of a certificate
    ("redis/utils.py", ("get_lib_version",)),
    ("asyncpg/connect_utils.py", ("_parse_connect_arguments",)),
    # once for each sandbox: a few kilobytes into a pipe that holds 64
    ("confinement/bubblewrap.py", ("open_data_pipe",)),
    # /proc is the kernel's memory, not a disk
    ("python/processes.py", ("process_tree", "_read_text", "measure_usage", "_is_descendant")),
    ("torch_backend/machine.py", ("free_bytes",)),
)
"""Functions, by their files, that may block the event loop; each with its reason."""
LONG_FILES: Final = ("stack/serving/test_serve.py", "test_documents.py", "test_linear_regexes.py", "test_structure.py")
"""Files that take half a minute and would come last: one process would still be at them when the others have ended."""
KERNELS: Final = "tests/providers/gpt_oss/kernels/"
"""Files for one process: each that compiles kernels starts a child that imports torch and Triton."""


class FilesAndKernels(LoadFileScheduling):
    """Gives a process a file at a time, or all of KERNELS."""

    def _split_scope(self, nodeid: str) -> str:
        return KERNELS if nodeid.startswith(KERNELS) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Schedule by FilesAndKernels where `--dist loadfile` asks for whole files."""
    return FilesAndKernels(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the folders of one mark where `-m` excludes that mark: each process would import what they alone need."""
    excluded = {f"not {name}" for name in ("console", "live")} & set(config.option.markexpr.split(" and "))
    is_ignored = f"not {collection_path.name}" in excluded and collection_path.parent == Path(__file__).parent
    return is_ignored or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with LONG_FILES, and keep the order of all others."""
    long_files = {Path(__file__).parent / name for name in LONG_FILES}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and exclude from it what that has built: of the 900,000 objects of modules
    and tests nearly all live to the end, where each of the last collections would take a second to visit them. Full
    collections are then a tenth as frequent: each takes 0.1 s, and nearly all garbage is young."""
    gc.disable()
    try:
        with _first_alone():
            return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(700, 10, 100)
        gc.enable()


@contextmanager
def _first_alone() -> Generator[None]:
    """Hold the lock of this checkout alone if it is free, else wait and share it. Of processes that begin together, one
    compiles what a fresh environment imports, 14 s of work, and the others then load the compiled files."""
    with open(__file__, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session", autouse=True)
def blocking_calls_fail() -> Generator[None]:
    """A call of the product's code that blocks the event loop (a sleep, a file, a socket) raises BlockingError."""
    with blockbuster_ctx(["apis", "providers", "stack"]) as guard:
        for blocking in guard.functions.values():
            for file, functions in MAY_BLOCK:
                blocking.can_block_in(file, functions)
        yield
