"""How near our kernels come to what a card can do: `python -m tests.bench.gpt_oss_gpu --out DIR`, under ten minutes.

Weights are random, at the true shapes, made on the card; so neither the speed of guessing nor any quality can be told
from them. Every share is of a limit from the bytes that this very run touched (experts are counted) at the speed that
copying reached on this very card. `--dry` runs all of it on a CPU with a tiny model and the kernels' references.
"""

import argparse
import asyncio
import importlib.metadata
import logging
import os
import platform
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, cast

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from providers.inference.gpt_oss.kernels.step import REFERENCE, TRITON, Kernels
from providers.inference.gpt_oss.kernels.weights import Weights
from providers.inference.gpt_oss.room import Wanted
from providers.inference.gpt_oss.triton_runner import TritonRunner, TritonSettings
from tests.bench.gpu_measures import Ceilings, agreement, ceilings, finite, kernel_table, prompt_table, step_table
from tests.bench.gpu_model import SPECS, make_weights
from tests.bench.gpu_report import tables, write
from tests.bench.gpu_rivals import rivals
from tests.bench.gpu_server import serve

PARTS: Final = ("agreement", "kernels", "steps", "prompts", "server", "rivals")
PACKAGES: Final = ("torch", "triton", "transformers", "tritonllm", "gpt_oss")

logger = logging.getLogger("gpt_oss_gpu")


@dataclass(frozen=True)
class Sizes:
    """What is run: true sizes on a card, tiny ones on a CPU."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    streams: tuple[int, ...] = (1, 8, 32, 128)
    stream_tokens: int = 512
    prompt_words: int = 400
    rival_rows: tuple[int, ...] = (1, 32)
    copied: int = 2**30
    room: Wanted = field(default_factory=lambda: Wanted(128, 40960, None))
    step_tokens: int = 8192


DRY: Final = Sizes((2,), (40,), (64,), (2,), 6, 20, (1,), 2**12, Wanted(2, 512, None), 256)


def measure(model: str, routing: Literal["uniform", "zipf"], parts: tuple[str, ...], *, dry: bool) -> dict[str, Any]:
    """All figures by name."""
    device = torch.device("cpu" if dry else "cuda")
    sizes, kernels = (DRY, REFERENCE) if dry else (Sizes(), TRITON)
    dtype = torch.float32 if dry else torch.bfloat16
    found: dict[str, Any] = {
        "model": model,
        "routing": routing,
        "device": platform.processor() or "CPU" if dry else torch.cuda.get_device_name(),
        "versions": versions(),
    }
    top = _timed("ceilings", lambda: ceilings(device, sizes.copied))
    found["ceilings"] = {"copy": top.copy, "read": top.read, "products": top.products}
    with torch.inference_mode():
        weights = _timed("weights", lambda: make_weights(SPECS[model], device, dtype, routing))
    runner = _timed("runner", lambda: _runner(weights, sizes, kernels))
    with torch.inference_mode():
        found["numbers"] = finite(weights, runner, kernels)
        found |= _on_device(weights, runner, (kernels, sizes, top), parts)
    if "server" in parts:
        streams = tuple(count for count in sizes.streams if count <= runner.slots)
        served: list[dict[str, Any]] = []
        for ahead in (True, False):
            runner.settings = replace(runner.settings, ahead=ahead)
            work = serve(runner, streams, sizes.stream_tokens, sizes.prompt_words)
            served += [{"ahead": ahead, **row} for row in _timed("server", lambda work=work: asyncio.run(work))]
        found["server"] = served
    if "rivals" in parts:
        del weights, runner
        if not dry:
            torch.cuda.empty_cache()
        found["rivals"] = _timed("rivals", lambda: rivals(SPECS[model], device, sizes.rival_rows))
    return found


def versions() -> dict[str, str]:
    installed = {each.metadata["Name"].replace("-", "_") for each in importlib.metadata.distributions()}
    known = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {"python": platform.python_version(), **known}


def _on_device(
    weights: Weights, runner: TritonRunner, how: tuple[Kernels, Sizes, Ceilings], parts: tuple[str, ...]
) -> dict[str, Any]:
    kernels, sizes, top = how
    asked = [(rows, context) for context in sizes.contexts for rows in sizes.rows]
    work = {
        "agreement": lambda: agreement(weights, runner, kernels),
        "kernels": lambda: kernel_table(runner, weights, kernels, sizes.rows, top),
        "steps": lambda: step_table(runner, weights, kernels, asked, top),
        "prompts": lambda: prompt_table(runner, weights, sizes.prompts, top),
    }
    return {name: _timed(name, measured) for name, measured in work.items() if name in parts}


def _runner(weights: Weights, sizes: Sizes, kernels: Kernels) -> TritonRunner:
    runner = TritonRunner(weights, TritonSettings(sizes.room, sizes.step_tokens), kernels)
    with torch.inference_mode():
        # What a step reads was never written here: it must be numbers at least.
        runner.tables.keys.normal_()
        runner.tables.values.normal_()
    return runner


def _timed(name: str, work: Any) -> Any:
    began = time.perf_counter()
    result = work()
    logger.info("%s: %.1f s", name, time.perf_counter() - began)
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SPECS], default="20b")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=None, help="a folder for gpt_oss.json, .md and .svg")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, with the kernels' references")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    routing = cast('Literal["uniform", "zipf"]', given.routing)
    found = measure("tiny" if given.dry else given.model, routing, tuple(given.parts), dry=given.dry)
    if given.out is not None:
        write(given.out, found)
    print(tables(found))


if __name__ == "__main__":
    main(sys.argv[1:])
