"""Compiles launches for cards that this machine does not have: registers, spills, shared memory and instructions.

A worker process (kernels are interpreted in this one) runs a launch function on memory that does not exist, with the
true model's shapes, and returns the kernels that Triton would have launched: exactly those constants, warps and
alignments.
"""

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from threading import Lock
from typing import Any, Final, Literal

ARCHITECTURES: Final = (80, 90, 100)
TRITON: Final = tuple(int(part) for part in version("triton").split(".")[:2])
OLD: Final = TRITON < (3, 7)
"""Triton 3.6 compiles to longer code, and its wgmma wait for each other; its output was inspected all the same."""

LEAST_SHARED: Final = 101_376
"""Bytes that a CTA may have on cards of capability 8.6, 8.9 and 12.0: those of 8.0, 9.0 and 10.0 allow far more."""

FREE: Final = ("norm_kernel", "norm_rows_kernel", "norm_digits_kernel", "route_kernel")
"""Kernels that read weights before they wait for the kernel before. No other reads anything, and none writes."""


@dataclass(frozen=True)
class Job:
    """A launch function (also the name of its file) for an architecture, with `rows` rows of a decoding step, or
    `rows` tokens of one sequence when they are not `singles`."""

    kernel: str
    architecture: int
    rows: int = 1
    singles: bool = True
    model: Literal["20b", "120b"] = "20b"


@dataclass(frozen=True)
class Loop:
    """A loop's body: from where the last instruction jumps back to. An outer loop's holds the inner ones' too."""

    opcodes: Mapping[str, int]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    def count(self, *opcodes: str) -> int:
        """Instructions whose opcode begins with one of these."""
        return sum(count for opcode, count in self.opcodes.items() if opcode.startswith(opcodes))

    @property
    def integer(self) -> int:
        """Those that share the integer pipes' half rate, or could be spared: all that is no product and no memory."""
        return self.count("IMAD", "IADD", "LOP", "SHF", "PRMT", "LEA", "ISETP", "SEL", "IABS", "MOV", "VIADD", "I2F")


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would be loaded. `shared_bytes` as launched; `spills` are loads and stores of local memory;
    `early` are the instructions before the wait for the previous kernel."""

    name: str
    registers: int
    shared_bytes: int
    spills: int
    opcodes: Mapping[str, int]
    early: Mapping[str, int]
    loops: Sequence[Loop]
    warps: int
    ptx: str

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def main_loop(self) -> Loop:
        """The largest that holds a product, innermost: the one to count instructions of a weight in."""
        opcodes = ("HGMMA", "HMMA", "UTCHMMA")
        if not any(loop.count(*opcodes) for loop in self.loops):
            opcodes = ("FFMA", "HFMA2")  # no tensor cores: what sums up parts is no product, but has many of these
        products = [loop for loop in self.loops if loop.count(*opcodes)]
        return max(products, key=lambda loop: loop.count(*opcodes) / loop.instructions)


@dataclass(frozen=True)
class Budget:
    """The committed numbers, of the largest kernel of a launch. There is none for spills: nothing may spill."""

    registers: int
    shared_bytes: int
    instructions: int


def check(job: Job, budget: Budget) -> Sequence[Compiled]:
    """Assert that every kernel of a launch compiles, spills nothing and is within its budget."""
    kernels = compiled(job)
    assert kernels, f"{job} launches nothing"
    for kernel in kernels:
        label = f"{kernel.name} for {job}"
        assert kernel.spills == 0, f"{label} spills {kernel.spills} times"
        assert kernel.registers <= budget.registers * (1.25 if OLD else 1), f"{label}: {kernel.registers} registers"
        assert kernel.shared_bytes <= budget.shared_bytes, f"{label}: {kernel.shared_bytes} bytes of shared memory"
        assert kernel.shared_bytes <= LEAST_SHARED, f"{label}: some cards have no {kernel.shared_bytes} bytes"
        allowed = budget.instructions * (1.6 if OLD else 1)
        assert kernel.instructions <= allowed, f"{label}: {kernel.instructions} instructions"
        check_operands(kernel)
        if job.architecture >= 90:
            check_order(kernel, free=kernel.name in FREE and job.kernel != "route")
    return kernels


def check_order(kernel: Compiled, *, free: bool) -> None:
    """Assert that nothing is read or written before the wait: outputs of another kernel are only read, and its inputs
    only overwritten, when it has ended. And the kernel lets the next one begin."""
    assert kernel.early != kernel.opcodes, f"{kernel.name} never waits for the kernel before"
    assert any(opcode.startswith("PREEXIT") for opcode in kernel.opcodes), f"{kernel.name} lets no other begin"
    writes = ("ST", "RED", "ATOM", "UBLKRED", "UTMAST")
    reads = ("LDG", "LD.", "UBLKCP", "UTMALDG")
    forbidden = writes if free else writes + reads
    # Shared memory belongs to the CTA alone.
    shared = ("STS", "ATOMS")
    moved = [opcode for opcode in kernel.early if opcode.startswith(forbidden) and not opcode.startswith(shared)]
    assert not moved, f"{kernel.name} does {moved} before it has waited"
    # A CTA that counts its arrival has a barrier between its threads' stores and the count, and one after it.
    events = re.findall(r"st\.global|bar\.sync|atom\.global\S*acq_rel", kernel.ptx)
    for place, event in enumerate(events):
        if event.startswith("atom"):
            assert events[place - 1] == "bar.sync" == events[place + 1], f"{kernel.name} counts without a barrier"


def check_operands(kernel: Compiled) -> None:
    """Assert that no product goes on whose left operand is in registers: a loop's next turn would write to them, as
    neither Triton nor ptxas makes it wait (triton-lang/triton#9433). On a card some sums are wrong then."""
    if re.search(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{", kernel.ptx):
        pending = {int(count) for count in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)}
        assert pending == {0}, f"{kernel.name} leaves {max(pending, default=0)} products under way"


def multiplying(architecture: int, columns: int) -> str:
    """Return the opcode of products of `columns` columns: the widest there is, but for 8 columns, which are too few for
    it before Triton 3.9."""
    if columns < 16 and TRITON < (3, 9):
        return "HMMA"
    return {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[architecture]


@cache
def compiled(job: Job) -> Sequence[Compiled]:
    """The kernels that a launch launches, in order. Takes 0.3 to 3 s a kernel; Triton's own cache makes it less."""
    return [_read(each) for each in _worker().ask(asdict(job))]


def _read(fields: dict[str, Any]) -> Compiled:
    loops = [Loop(opcodes) for opcodes in fields.pop("loops")]
    return Compiled(**fields, loops=loops)


def left_to_compile(architecture: int, model: str, slots: int, step_tokens: int) -> tuple[int, list[str]]:
    """Return how many kernels a runner compiles before it serves, and the names of those that it would have to compile
    when requests wait already: there may be none."""
    job = {"architecture": architecture, "model": model, "slots": slots, "step_tokens": step_tokens}
    counts = _worker().answer(job)
    return counts["before"], counts["later"]


class Worker:
    """A process that compiles, one job after the other."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.providers.gpt_oss.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lock = Lock()
        atexit.register(self.close)

    def ask(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.answer(job)["kernels"]

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the worker ended: what it said is above"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@cache
def _worker() -> Worker:
    return Worker()
