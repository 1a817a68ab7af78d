"""Others on the same card with the same shapes, as far as they can be imported; one that fails says why, and no more.

transformers runs the model with its experts as numbers (its MXFP4 kernels are fetched from a hub); OpenAI's reference
in torch has no batches and no cache; tritonllm is a whole engine for one sequence, and its copy of triton_kernels'
matmul_ogs is what vLLM, SGLang and transformers run experts with. Each runs in a process of its own: two of them bring
a package of one name, and any may take all memory, end the process or never end.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from tests.bench.gpu_measures import Row, graphed, timed, wait
from tests.bench.gpu_model import SPECS
from tests.support.models.random_checkpoints import transformers_config

PROMPT: Final = 1024
TOKENS: Final = 64
ROOT: Final = Path(__file__).parents[2]
ROW: Final = '{"rows": '
LONGEST_S: Final = 150.0
LEFT_S: Final = 15.0
"""Seconds of the time left that are reserved to write the figures down."""


def rival(name: str, model: str, rows: Sequence[int], left_s: float) -> list[Row] | dict[str, str]:
    """Its figures, as far as it came; raises RuntimeError with the last it said when it fails before the first."""
    needed, _ = RIVALS[name]
    if model == "tiny" and name != "transformers":
        return {"skipped": "needs a GPU"}
    if importlib.util.find_spec(needed) is None:
        return {"skipped": f"{needed} is not installed"}
    command = [sys.executable, "-m", "tests.bench.gpu_rivals", name, model, *map(str, rows)]
    limit_s = min(LONGEST_S, max(1.0, left_s - LEFT_S))
    with TemporaryFile("w+") as output, TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, stdout=output, stderr=said, text=True
        )
        try:
            ended = f"it ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"it did not end in {limit_s:.0f} s"
        output.seek(0)
        said.seek(0)
        results: list[Row] = [json.loads(line) for line in output if line.startswith(ROW)]
        if process.returncode:
            last = f"{ended}: {said.read()[-1500:]}"
            if not results:
                raise RuntimeError(last)
            results.append({"failed": last})
    return results


def main(name: str, model: str, *rows: str) -> None:
    """In the process of its own: a line of JSON for every row, as soon as it is known."""
    _, measure = RIVALS[name]
    device = torch.device("cpu" if model == "tiny" else "cuda")
    for row in measure(SPECS[model], device, tuple(map(int, rows))):
        print("\n" + json.dumps(row), flush=True)


def _transformers(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> Iterator[Row]:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GptOssConfig(**transformers_config(spec, experts_packed=False))
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.GptOssForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
    on_card = device.type == "cuda"
    prompt, tokens = (PROMPT, TOKENS) if on_card else (8, 8)
    for cache in ("dynamic", "static") if on_card else ("dynamic",):
        for count in rows:
            ids = torch.randint(0, 1000, (count, prompt), device=device)

            def generate(new: int, ids: Tensor = ids, cache: str = cache) -> float:
                wait(device)
                began = time.perf_counter()
                settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
                with torch.inference_mode():
                    model.generate(ids, cache_implementation=cache, **settings)
                wait(device)
                return time.perf_counter() - began

            generate(2)
            whole, first = (min(generate(new) for _ in range(3)) for new in (tokens, 1))
            seconds = (whole - first) / (tokens - 1)
            yield {"rows": count, "context": prompt, "cache": cache, "ms": 1e3 * seconds, "tokens/s": count / seconds}


def _tritonllm(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> Iterator[Row]:
    importlib.import_module("tritonllm")
    module: Any = importlib.import_module("gpt_oss.triton.model")
    with torch.inference_mode():
        model = module.Transformer(config=module.ModelConfig(**_shape(spec)), device=device).eval()
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
        for block in model.block:
            for part in ("mlp1", "mlp2"):
                getattr(block.mlp, f"{part}_weight_mx").storage.data.fill_(120)
            block.mlp.refresh_fp32_bias_caches()
        caches = [module.Cache(1, 2 * PROMPT, spec.kv_heads, device=device) for _ in model.block]
        model.prefill(torch.randint(0, 1000, (1, PROMPT), device=device, dtype=torch.int32), caches)
        token = torch.zeros(1, 1, dtype=torch.int32, device=device)
        seconds, _ = timed(graphed(lambda: model(token, caches=caches), device), device, 20)
    yield {"rows": 1, "context": PROMPT, "ms": 1e3 * seconds, "tokens/s": 1 / seconds}


def _reference(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> Iterator[Row]:
    """Measure the reference, which computes the whole sequence again for every token: a step has PROMPT tokens."""
    module: Any = importlib.import_module("gpt_oss.torch.model")
    with torch.inference_mode():
        model = module.Transformer(config=module.ModelConfig(**_shape(spec)), device=device).eval()
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
        tokens = torch.randint(0, 1000, (PROMPT,), device=device)
        seconds, _ = timed(lambda: model(tokens), device)
    yield {"rows": 1, "context": PROMPT, "ms": 1e3 * seconds, "tokens/s": 1 / seconds}


def _matmul_ogs(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> Iterator[Row]:
    """Experts of four layers in turn, router included, so that no weights are in the cache already."""
    importlib.import_module("tritonllm")
    module: Any = importlib.import_module("gpt_oss.triton.moe")
    layers = [_ogs_layer(spec, device, module) for _ in range(4)]
    for count in rows:
        hidden = torch.randn(count, spec.hidden, device=device, dtype=torch.bfloat16)

        def work(hidden: Tensor = hidden) -> None:
            for layer in layers:
                module.moe(hidden, **layer, experts_per_token=spec.experts_per_token, num_experts=spec.experts)

        launched: Callable[[], object] = graphed(work, device)
        seconds, _ = timed(launched, device, 5)
        yield {"rows": count, "us_a_layer": 1e6 * seconds / len(layers)}


def _ogs_layer(spec: ModelSpec, device: torch.device, module: Any) -> Mapping[str, Any]:
    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (
            torch.randn(shape, device=device, dtype=dtype) * shape[-2] ** -0.5
            if len(shape) > 1
            else torch.zeros(shape, device=device, dtype=dtype)
        )

    w1, w1_mx = module.quantize_mx4(random(spec.experts, spec.hidden, 2 * spec.intermediate))
    w2, w2_mx = module.quantize_mx4(random(spec.experts, spec.intermediate, spec.hidden))
    wide = torch.float32
    return {
        "wg": random(spec.hidden, spec.experts),
        "bg": random(spec.experts, dtype=wide),
        "w1": w1,
        "w1_mx": w1_mx,
        "b1": random(spec.experts, 2 * spec.intermediate, dtype=wide),
        "w2": w2,
        "w2_mx": w2_mx,
        "b2": random(spec.experts, spec.hidden, dtype=wide),
    }


def _fill(name: str, parameter: Tensor) -> None:
    if parameter.dtype == torch.uint8:
        parameter.random_(0, 256)
    elif "norm" in name:
        parameter.fill_(1)
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _shape(spec: ModelSpec) -> dict[str, int]:
    return {
        "num_hidden_layers": len(spec.layers),
        "num_experts": spec.experts,
        "experts_per_token": spec.experts_per_token,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "sliding_window": spec.window,
    }


RIVALS: Final[Mapping[str, tuple[str, Callable[[ModelSpec, torch.device, tuple[int, ...]], Iterator[Row]]]]] = {
    "matmul_ogs": ("tritonllm", _matmul_ogs),
    "tritonllm": ("tritonllm", _tritonllm),
    "gpt_oss torch": ("gpt_oss", _reference),
    "transformers": ("transformers", _transformers),
}
"""By name: the package it needs, and what measures it. The slowest to start comes last."""

if __name__ == "__main__":
    main(*sys.argv[1:])
