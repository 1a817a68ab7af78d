"""Others on the same card with the same shapes, as far as they can be imported; one that fails says why, and no more.

transformers runs the model with its experts as numbers (its MXFP4 kernels are fetched from a hub); OpenAI's reference
in torch has no batches and no cache; tritonllm is a whole engine for one sequence, and its copy of triton_kernels'
matmul_ogs is what vLLM, SGLang and transformers run experts with.
"""

import importlib
import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.spec import ModelSpec
from providers.inference.gpt_oss.synth import transformers_config
from tests.bench.gpu_measures import Row, graphed, timed, wait

PROMPT: Final = 1024
TOKENS: Final = 64


def rivals(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> list[Row]:
    """A line for each rival and batch; `skipped` or `failed` say why there is no figure."""
    found: list[Row] = []
    for name, needed, measure in (
        ("matmul_ogs", "tritonllm", _matmul_ogs),
        ("tritonllm", "tritonllm", _tritonllm),
        ("transformers", "transformers", _transformers),
        ("gpt_oss torch", "gpt_oss", _reference),
    ):
        if device.type == "cpu" and name != "transformers":
            found.append({"rival": name, "skipped": "needs a GPU"})
        elif importlib.util.find_spec(needed) is None:
            found.append({"rival": name, "skipped": f"{needed} is not installed"})
        else:
            try:
                found += [{"rival": name, **row} for row in measure(spec, device, rows)]
            except Exception as exc:  # noqa: BLE001 - a rival's failure is a result
                found.append({"rival": name, "failed": repr(exc), "where": traceback.format_exc(limit=-3)})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _transformers(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> list[Row]:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GptOssConfig(**transformers_config(spec, packed=False))
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.GptOssForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
    on_card = device.type == "cuda"
    prompt, tokens = (PROMPT, TOKENS) if on_card else (8, 8)
    cache = {"cache_implementation": "static"} if on_card else {}
    table: list[Row] = []
    for count in rows:
        ids = torch.randint(0, 1000, (count, prompt), device=device)

        def generate(new: int, ids: Tensor = ids) -> float:
            wait(device)
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **cache)
            wait(device)
            return time.perf_counter() - began

        generate(2)
        whole, first = (min(generate(new) for _ in range(3)) for new in (tokens, 1))
        seconds = (whole - first) / (tokens - 1)
        table.append({"rows": count, "context": prompt, "ms": 1e3 * seconds, "tokens/s": count / seconds})
    return table


def _tritonllm(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> list[Row]:
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
    return [{"rows": 1, "context": PROMPT, "ms": 1e3 * seconds, "tokens/s": 1 / seconds}]


def _reference(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> list[Row]:
    """It computes the whole sequence anew for every token: a step here is one of PROMPT tokens."""
    module: Any = importlib.import_module("gpt_oss.torch.model")
    with torch.inference_mode():
        model = module.Transformer(config=module.ModelConfig(**_shape(spec)), device=device).eval()
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
        tokens = torch.randint(0, 1000, (PROMPT,), device=device)
        seconds, _ = timed(lambda: model(tokens), device)
    return [{"rows": 1, "context": PROMPT, "ms": 1e3 * seconds, "tokens/s": 1 / seconds}]


def _matmul_ogs(spec: ModelSpec, device: torch.device, rows: tuple[int, ...]) -> list[Row]:
    """Experts of four layers in turn, router included, so that no weights are in the cache already."""
    importlib.import_module("tritonllm")
    module: Any = importlib.import_module("gpt_oss.triton.moe")
    layers = [_ogs_layer(spec, device, module) for _ in range(4)]
    table: list[Row] = []
    for count in rows:
        hidden = torch.randn(count, spec.hidden, device=device, dtype=torch.bfloat16)

        def work(hidden: Tensor = hidden) -> None:
            for layer in layers:
                module.moe(hidden, **layer, experts_per_token=spec.experts_per_token, num_experts=spec.experts)

        launched: Callable[[], object] = graphed(work, device)
        seconds, _ = timed(launched, device, 5)
        table.append({"rows": count, "us_a_layer": 1e6 * seconds / len(layers)})
    return table


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
