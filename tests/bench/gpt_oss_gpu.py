"""How near our kernels come to what a card can do: `python -m tests.bench.gpt_oss_gpu --out DIR`, under ten minutes.

Weights are random, at the true shapes, made on the card; so they show neither the speed of guessing nor any
quality. Every share is of a limit from the bytes that this very run touched (experts are counted) at the speed that
copying reached on this very card. A part that fails or would take too long says so, and the others go on; what is known
is written after each. `--dry` runs all of it on a CPU with a tiny model: kernels interpreted where they are held
against their references, and references where time is taken.
"""

import argparse
import asyncio
import faulthandler
import gc
import importlib
import logging
import os
import platform
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if "--dry" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from providers.inference.gpt_oss.sizing.kv_memory import KvRequest
from providers.inference.gpt_oss.triton_backend.kernels import device as launching
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON, Kernels
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights
from providers.inference.gpt_oss.triton_backend.runner import TritonRunner, TritonSettings
from tests.bench.gpu_agreement import agreement
from tests.bench.gpu_machine import versions
from tests.bench.gpu_measures import (
    Ceilings,
    Row,
    Stage,
    ceilings,
    kernel_table,
    make_stage,
    prompt_table,
    spreads,
    step_table,
)
from tests.bench.gpu_model import SPECS, make_weights
from tests.bench.gpu_parts import Parts
from tests.bench.gpu_report import tables
from tests.bench.gpu_rivals import RIVALS, rival
from tests.bench.gpu_soak import soak
from tests.support.models.kernel_references import REFERENCE

PARTS: Final = ("agreement", "kernels", "steps", "prompts", "server", "rivals")
SOAK: Final = "soak"
"""Not one of those that are run unless named: it takes all the time that there is."""

NEEDS_S: Final = {
    "20b": {"agreement": 40, "kernels": 60, "runner": 100, "steps": 30, "prompts": 15, "server": 100, "rivals": 60},
    "120b": {"agreement": 60, "kernels": 80, "runner": 110, "steps": 50, "prompts": 20, "server": 140, "rivals": 60},
}
"""Seconds that a part may take on a Hopper card, compiling included: it does not begin with less left. Together with
30 s for ceilings and weights that is 7 minutes, and 9 for the larger model. Each rival may use all the time that is
left."""

SECONDS: Final = 560.0
FORMULA: Final = "max(bytes read / copied bytes a second, operations / products' operations a second) / time"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the work that is measured: true sizes on a card, tiny ones on a CPU."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    checked: tuple[int, ...] = (1, 3, 24, 128)
    checked_prompts: tuple[int, ...] = (300,)
    streams: tuple[int, ...] = (1, 8, 32, 128)
    stream_tokens: int = 512
    prompt_words: int = 400
    rival_rows: tuple[int, ...] = (1, 32)
    copied: int = 2**30
    room: KvRequest = field(default_factory=lambda: KvRequest(128, 40960, None))
    step_tokens: int = 8192


DRY: Final = Sizes((2,), (40,), (64,), (5,), (20,), (2,), 6, 20, (1,), 2**12, KvRequest(2, 512, None), 256)


@dataclass(frozen=True)
class Asked:
    """The options of the command line: a model and the parts to run."""

    model: str
    routing: Literal["uniform", "zipf"]
    parts: tuple[str, ...]
    dry: bool
    certified: bool = False

    @property
    def sizes(self) -> Sizes:
        return DRY if self.dry else Sizes()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def kernels(self) -> Kernels:
        return REFERENCE if self.dry else TRITON

    def weights(self, vocabulary: int | None = None) -> Weights:
        spec = SPECS[self.model]
        spec = replace(spec, vocabulary=vocabulary or spec.vocabulary)
        with torch.inference_mode():
            dtype = torch.float32 if self.dry else torch.bfloat16
            return make_weights(spec, self.device, dtype, self.routing, certified=self.certified)


def measure(request: Asked, parts: Parts) -> None:
    """Fill `parts.results` with all figures, by name."""
    needs = {} if request.dry else NEEDS_S[request.model]
    top = Ceilings(0, 0, 0)
    shared: dict[str, Any] = {}

    def find_ceilings() -> dict[str, float]:
        nonlocal top
        top = ceilings(request.device, request.sizes.copied)
        return {"copy": top.copy, "read": top.read, "products": top.products}

    def make() -> str:
        shared["weights"] = request.weights()
        return f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB" if not request.dry else "tiny"

    if parts.run("ceilings", find_ceilings) and parts.run("weights", make):
        _by_themselves(request, parts, shared["weights"], top)
        _in_steps(request, parts, shared["weights"], top)
    if "rivals" in request.parts:
        shared.clear()
        _free(request)
        for name in RIVALS:
            run_rival = partial(rival, name, request.model, request.sizes.rival_rows)
            parts.run(f"rival {name}", lambda rival_run=run_rival: rival_run(parts.left_s), needs.get("rivals", 0))


def _by_themselves(request: Asked, parts: Parts, weights: Weights, top: Ceilings) -> None:
    """Run the parts that measure launch functions one by one. One that fails leaves the others' figures as they are."""
    sizes = request.sizes
    needs = {} if request.dry else NEEDS_S[request.model]
    if request.dry:  # interpreted, a true vocabulary takes minutes
        weights = request.weights(vocabulary=300)

    @torch.inference_mode()
    def on_stage(work: Any) -> Any:
        slots = max((*sizes.rows, *sizes.checked))
        stage: Stage = make_stage(weights, request.kernels, top, slots, max((*sizes.contexts[:1], *sizes.prompts)))
        return work(stage)

    if "kernels" in request.parts or "agreement" in request.parts:
        parts.run("spreads", lambda: on_stage(spreads))
    if "agreement" in request.parts:
        check = torch.inference_mode()(lambda: agreement(weights, TRITON, sizes.checked, sizes.checked_prompts))
        parts.run("agreement", check, needs.get("agreement", 0))
    if "kernels" in request.parts:

        def time_all(stage: Stage) -> list[Row]:
            return kernel_table(stage, sizes.rows, sizes.prompts)

        parts.run("kernels", lambda: on_stage(time_all), needs.get("kernels", 0))
    _free(request)


def _in_steps(request: Asked, parts: Parts, weights: Weights, top: Ceilings) -> None:
    """Run the parts that need a runner: whole steps, prompts and the server."""
    sizes = request.sizes
    needs = {} if request.dry else NEEDS_S[request.model]
    pairs = [(rows, context) for context in sizes.contexts for rows in sizes.rows]
    expected = [name for name in ("steps", "prompts", "server", SOAK) if name in request.parts]
    runners: list[TritonRunner] = []

    def make() -> str:
        runners.append(_runner(weights, sizes, request.kernels))
        return f"{runners[0].page_count} pages, {len(runners[0].shapes.all_shapes())} shapes"

    if not expected or not parts.run("runner", make, needs.get("runner", 0)):
        return
    runner = runners.pop()
    work = {
        "steps": torch.inference_mode()(lambda: step_table(runner, weights, request.kernels, pairs, top)),
        "prompts": torch.inference_mode()(lambda: prompt_table(runner, weights, sizes.prompts, top)),
        "server": lambda: _served(runner, sizes),
        SOAK: lambda: soak(runner, 1.0 if request.dry else parts.left_s - 20),
    }
    for name in expected:
        parts.run(name, work[name], needs.get(name, 0))


def _served(runner: TritonRunner, sizes: Sizes) -> list[dict[str, Any]]:
    """Imported here: all else runs where there are no packages but torch's."""
    server = cast("Any", importlib.import_module("tests.bench.gpu_server"))
    streams = tuple(count for count in sizes.streams if count <= runner.slots)
    results: list[dict[str, Any]] = []
    settings = runner.settings
    for ahead in (True, False):
        runner.settings = replace(settings, launch_ahead=ahead)
        work = server.serve(runner, streams, sizes.stream_tokens, sizes.prompt_words)
        results += [{"ahead": ahead, **row} for row in asyncio.run(work)]
    runner.settings = settings
    return results


def _runner(weights: Weights, sizes: Sizes, kernels: Kernels) -> TritonRunner:
    runner = TritonRunner(weights, TritonSettings(sizes.room, sizes.step_tokens), kernels)
    with torch.inference_mode():
        # What a step reads was never written here: it must be numbers at least.
        runner.tables.keys.normal_()
        runner.tables.values.normal_()
    return runner


def _free(request: Asked) -> None:
    gc.collect()
    if not request.dry:
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SPECS], default="20b")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, SOAK], default=PARTS)
    parser.add_argument("--out", type=Path, default=None, help="a folder for gpt_oss_MODEL.json, .md and .svg")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="it ends by then, whatever it is at")
    parser.add_argument("--one-by-one", action="store_true", help="no kernel begins before the last one has ended")
    parser.add_argument("--certified", action="store_true", help="few rows are sampled by an int8 unembedding's bounds")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if options.one_by_one:
        cast("dict[str, Any]", vars(launching))["MIN_DEPENDENT_CAPABILITY"] = sys.maxsize
    if not options.dry and launching.INTERPRETED:
        parser.error("TRITON_INTERPRET is set: kernels would not run on the card")
    routing = cast('Literal["uniform", "zipf"]', options.routing)
    request = Asked(
        "tiny" if options.dry else options.model, routing, tuple(options.parts), options.dry, options.certified
    )
    results: dict[str, Any] = {
        "model": request.model,
        "routing": routing,
        "device": platform.processor() or "CPU" if request.dry else torch.cuda.get_device_name(),
        "versions": versions(),
        "overlapping": not options.one_by_one,
        "certified": options.certified,
        "share": FORMULA,
    }
    # A hang, on a card or in a compiler, is shown and ended; the figures measured until then are written already.
    faulthandler.dump_traceback_later(options.seconds + 20, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        measure(request, Parts(results, options.out, options.seconds))
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(tables(results))


if __name__ == "__main__":
    main(sys.argv[1:])
