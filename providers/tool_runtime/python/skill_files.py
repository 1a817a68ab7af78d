"""Files of skills, as bubblewrap puts them into a sandbox before anything runs in it: no program can change them."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from apis.skills.bundle import SkillFile
from providers.common.processes.process import open_memory_file

SKILLS_FOLDER: Final = "/mnt/skills"
"""Folder of the skills' folders, on a file system of its own."""
_MAX_OVERHEAD_BYTES: Final = 4096 * 1024
"""Room in that file system in addition to the files: each takes whole pages."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Options of bubblewrap, and the descriptors that they read from."""

    options: Sequence[str] = ()
    descriptors: Sequence[int] = ()


@contextmanager
def open_skill_files(files: Sequence[SkillFile]) -> Generator[Mount]:
    """Open the files in memory, and close them on exit; no files need nothing."""
    if not files:
        yield Mount()
        return
    size_bytes = sum(len(file.data) for file in files) + _MAX_OVERHEAD_BYTES
    options, descriptors = ["--size", str(size_bytes), "--tmpfs", SKILLS_FOLDER], list[int]()
    with ExitStack() as opened:
        for file in files:
            descriptor = opened.enter_context(open_memory_file("skill", file.data))
            mode = "0555" if file.is_executable else "0444"
            options += ["--perms", mode, "--file", str(descriptor), f"{SKILLS_FOLDER}/{file.path}"]
            descriptors.append(descriptor)
        yield Mount([*options, "--remount-ro", SKILLS_FOLDER], descriptors)
