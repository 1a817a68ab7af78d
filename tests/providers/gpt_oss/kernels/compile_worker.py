"""The worker process of `compiling`: launches kernels on no device and writes the compiled kernels, a line of JSON a
job."""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false

import hashlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.batch import StepShape, StepShapes
from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers, TableSizes, make_step, make_tables
from providers.inference.gpt_oss.triton_backend.kernels.layout import (
    TILE_DEPTH,
    TILE_ROWS,
    TILE_SCALES,
    TILE_WORDS,
    TiledExperts,
)
from providers.inference.gpt_oss.triton_backend.kernels.narrow import Int8Unembedding
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights, Layer, Weights
from providers.inference.gpt_oss.triton_backend.steps import StepLauncher
from tests.support.models.random_checkpoints import tiny_spec_with

NOWHERE: Final = torch.device("meta")
LISTING: Final = "kernel.sass"
TOOLS: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION: Final = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
MODELS: Final = {"20b": (24, 32), "120b": (36, 128)}


class NoCard:
    """Stands in for Triton's driver without a card: it only knows the architecture to compile for."""

    def __init__(self, architecture: int, fresh: bool = False) -> None:
        """Make Triton compile again for a `fresh` card, ignoring kernels that it compiled before."""
        self._target = GPUTarget("cuda", architecture, 32)
        self._number = architecture + 1000 * fresh

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        """Return a number for the architecture: Triton caches compiled kernels by device."""
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return NOWHERE


def spec_of(model: str) -> ModelSpec:
    layers, experts = MODELS[model]
    return tiny_spec_with(
        layers=("sliding_attention", "full_attention") * (layers // 2),
        hidden=2880,
        intermediate=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts=experts,
        vocabulary=201088,
        window=128,
    )


def make_layer(spec: ModelSpec, window: int | None) -> Layer:
    def numbers(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=kind, device=NOWHERE)

    def experts(rows: int, depth: int) -> TiledExperts:
        tiles = (spec.experts, -(-rows // TILE_ROWS), -(-depth // TILE_DEPTH))
        values = numbers(*tiles, TILE_WORDS, kind=torch.int16)
        return TiledExperts(
            values, numbers(*tiles, TILE_SCALES, kind=torch.uint8), numbers(spec.experts, rows), rows, depth
        )

    wide = torch.float32
    return Layer(
        spec=spec,
        index=1,
        window=window,
        rotary=numbers(2, spec.context_tokens, spec.head_dim // 2, kind=wide),
        attention_norm=numbers(spec.hidden, kind=wide),
        qkv_weight=numbers(spec.qkv, spec.hidden),
        qkv_bias=numbers(spec.qkv),
        sinks=numbers(spec.heads, kind=wide),
        out_weight=numbers(spec.hidden, spec.heads * spec.head_dim),
        out_bias=numbers(spec.hidden),
        mlp_norm=numbers(spec.hidden, kind=wide),
        router_weight=numbers(spec.experts, spec.hidden),
        router_bias=numbers(spec.experts),
        gate_up=experts(2 * spec.intermediate, spec.hidden),
        down=experts(spec.hidden, spec.intermediate),
    )


def launches(job: dict[str, Any]) -> list[Any]:
    """Return the kernels that Triton compiled while the launch function ran, on a full layer and then on a sliding
    one."""
    spec = spec_of(job["model"])
    rows = job["rows"]
    tables = make_tables(spec, TableSizes(128, 32768, 1 << 17, torch.bfloat16, NOWHERE))
    step: StepBuffers = make_step(spec, tables, rows, min(rows, 128), rows if job["singles"] else 0)
    weight = torch.empty(spec.vocabulary, spec.hidden, dtype=torch.bfloat16, device=NOWHERE)
    narrow = Int8Unembedding(weight.to(torch.int8), *torch.empty(3, spec.vocabulary, device=NOWHERE))
    ends = EndWeights(spec, weight, torch.empty(spec.hidden, device=NOWHERE), weight, narrow)
    full = make_layer(spec, None)
    launch = getattr(
        importlib.import_module(f"providers.inference.gpt_oss.triton_backend.kernels.{job['kernel']}"), job["kernel"]
    )
    kernels: list[Any] = []
    original = triton.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = original(self, *arguments, grid=grid, warmup=True, **named)
        if all(kernel is not each for each in kernels):
            kernels.append(kernel)
        return kernel

    triton.JITFunction.run = compile_only
    try:
        if "ends" in launch.__annotations__:
            launch(ends, step)
        else:
            launch(full, step)
            launch(replace(full, window=spec.window), step)
    finally:
        triton.JITFunction.run = original
    return kernels


class Unknown(StepLauncher):
    """A launcher of steps that no device runs: nothing is captured."""

    def _capture(self, shape: StepShape) -> None:
        pass


def compiled_when(job: dict[str, Any]) -> dict[str, Any]:
    """Return how many kernels a runner's warm-up compiles, and which all possible later steps would add."""
    triton.runtime.driver.set_active(NoCard(job["architecture"], fresh=True))
    spec = replace(spec_of(job["model"]), layers=("full_attention", "sliding_attention"))
    tables = make_tables(spec, TableSizes(job["slots"], 32768, 1 << 17, torch.bfloat16, NOWHERE))
    weight = torch.empty(spec.vocabulary, spec.hidden, dtype=torch.bfloat16, device=NOWHERE)
    ends = EndWeights(spec, weight, torch.empty(spec.hidden, device=NOWHERE), weight)
    layers = (make_layer(spec, None), replace(make_layer(spec, spec.window), index=0))
    shapes = StepShapes(job["slots"], job["step_tokens"])
    steps = Unknown(Weights(spec, layers, ends), tables, shapes, TRITON)
    compiled: dict[tuple[str, str], None] = {}
    original, synchronize = triton.JITFunction._do_compile, torch.cuda.synchronize

    def never(self: Any, key: Any, *arguments: Any, **named: Any) -> None:
        compiled[self.__name__, str(key)] = None

    triton.JITFunction._do_compile = never
    torch.cuda.synchronize = lambda device=None: None
    try:
        steps.warm_up(shapes.all_shapes())
        before = len(compiled)
        rows = shapes.buckets[-1]
        mixed = [(singles, spans) for spans in shapes.spans for singles in (0, *shapes.buckets)]
        tiles = {shape.rows - shape.singles: shape.tiles for shape in shapes.all_shapes()}
        steps.warm_up([StepShape(singles + spans, singles, rows, tiles[spans]) for singles, spans in mixed])
    finally:
        triton.JITFunction._do_compile, torch.cuda.synchronize = original, synchronize
    return {"before": before, "later": [name for name, _ in list(compiled)[before:]]}


def measured(kernel: Any) -> dict[str, Any]:
    listing = _listing(kernel.asm["cubin"])
    usage = USAGE.search(listing)
    assert usage is not None, listing
    body = [(int(at, 16), opcode, rest) for at, opcode, rest in _instructions(listing)]
    spills = sum(opcode.startswith(("LDL", "STL")) for _, opcode, _ in body)
    return {
        "name": kernel.metadata.name,
        "registers": int(usage[1]),
        "shared_bytes": int(kernel.metadata.shared),
        "spills": max(spills, int(usage[2]) // 4),
        "opcodes": _counted(body),
        "early": _counted(_before_waiting(body)),
        "loops": [_counted(body[low : high + 1]) for low, high in _loops(body)],
        "warps": kernel.metadata.num_warps,
        "ptx": kernel.asm["ptx"],
    }


def _listing(cubin: bytes) -> str:
    """Return a kernel's resources and instructions. They are kept where Triton keeps the kernel: the disassembler takes
    0.4 s to start."""
    digest = hashlib.sha256(cubin + triton.__version__.encode()).hexdigest()
    cache = get_cache_manager(digest)
    if (listing_path := cache.get_file(LISTING)) is not None:
        return Path(listing_path).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = _tool("cuobjdump", "-res-usage", "-sass", file.name)
    cache.put(listing, LISTING, binary=False)
    return listing


def _instructions(listing: str) -> Sequence[tuple[str, str, str]]:
    matches = [match.groups() for match in map(INSTRUCTION.match, listing.splitlines()) if match]
    return [(at, opcode, rest) for at, opcode, rest in matches if opcode != "NOP"]


def _before_waiting(body: Sequence[tuple[int, str, str]]) -> Sequence[tuple[int, str, str]]:
    """Return the instructions before the wait for the previous kernel; all of them where nothing waits."""
    waits = (index for index, (_, opcode, _) in enumerate(body) if opcode.startswith("ACQBULK"))
    return body[: next(waits, len(body))]


def _loops(body: Sequence[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """Return the indices of the first and last instruction of every backward branch's body, but for a jump to
    itself."""
    places = {at: index for index, (at, _, _) in enumerate(body)}
    loops: list[tuple[int, int]] = []
    for index, (at, opcode, rest) in enumerate(body):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < at and int(target[1], 16) in places:
            loops.append((places[int(target[1], 16)], index))
    return loops


def _counted(body: Sequence[tuple[int, str, str]]) -> dict[str, int]:
    return dict(Counter(opcode for _, opcode, _ in body))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, check=True, text=True, timeout=60
    ).stdout


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        try:
            triton.runtime.driver.set_active(NoCard(job["architecture"]))
            if "slots" in job:
                answer = compiled_when(job)
            else:
                answer = {"kernels": [measured(kernel) for kernel in launches(job)]}
        except Exception:  # noqa: BLE001 - returned to the test
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
