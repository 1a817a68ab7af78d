"""What a launch compiles to: registers, spills, shared memory and instructions, on cards that are not there.

A worker process (kernels are interpreted in this one) runs a launch function on memory that does not exist, with the
true model's shapes, and hands back what Triton would have launched: exactly those constants, warps and alignments.
"""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from threading import Lock
from typing import Any, Final, Literal

ARCHITECTURES: Final = (80, 90, 100)


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
    """A kernel as it would be loaded. `shared_bytes` as launched; `spills` are loads and stores of local memory."""

    name: str
    registers: int
    shared_bytes: int
    spills: int
    opcodes: Mapping[str, int]
    loops: Sequence[Loop]
    warps: int
    ptx: str

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def main_loop(self) -> Loop:
        """The largest that holds a product, innermost: the one to count instructions of a weight in."""
        products = [loop for loop in self.loops if loop.count("HGMMA", "HMMA", "UTCHMMA", "FFMA", "HFMA2")]
        return max(
            products, key=lambda loop: loop.count("HGMMA", "HMMA", "UTCHMMA", "FFMA", "HFMA2") / loop.instructions
        )


@dataclass(frozen=True)
class Budget:
    """The committed numbers, of the largest kernel of a launch. There is none for spills: nothing may spill."""

    registers: int
    shared_bytes: int
    instructions: int


def check(job: Job, budget: Budget) -> Sequence[Compiled]:
    """Every kernel of a launch compiles, spills nothing and is within its budget."""
    kernels = compiled(job)
    assert kernels, f"{job} launches nothing"
    for kernel in kernels:
        shown = f"{kernel.name} for {job}"
        assert kernel.spills == 0, f"{shown} spills {kernel.spills} times"
        assert kernel.registers <= budget.registers, f"{shown}: {kernel.registers} registers"
        assert kernel.shared_bytes <= budget.shared_bytes, f"{shown}: {kernel.shared_bytes} bytes of shared memory"
        assert kernel.instructions <= budget.instructions, f"{shown}: {kernel.instructions} instructions"
    return kernels


@cache
def compiled(job: Job) -> Sequence[Compiled]:
    """The kernels that a launch launches, in order. Takes 0.3 to 3 s a kernel; Triton's own cache makes it less."""
    return [_read(each) for each in _worker().ask(asdict(job))]


def _read(told: dict[str, Any]) -> Compiled:
    loops = [Loop(opcodes) for opcodes in told.pop("loops")]
    return Compiled(**told, loops=loops)


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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the worker ended: what it said is above"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["kernels"]

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
