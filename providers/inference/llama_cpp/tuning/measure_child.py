"""Child process that measures a model's speed by the number of threads and the size of batches.

Run as a script, with one line of JSON settings on stdin: `model_path`, `sample_path` for the stand-in of the model,
`threads` to try in order, and `batches` to try with the best of them. For each try it writes a line of
JSON to stdout: `threads`, `batch`, and tokens per second of `decode` and `prefill`.
The parent ends it when the time is over. Nothing of this project is imported here but the writer of the stand-in.
"""

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DECODE_TOKENS = 8
PROMPT_TOKENS = (64, 256, 1024)
LONG_ENOUGH_S = 0.1
"""A prompt that takes so long is long enough to compare by; a shorter time is mostly noise."""
BATCH = 512


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    # Untyped, and its import may fail, which the exit status says.
    engine: Any = importlib.import_module("xllamacpp")
    cpu = engine.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    if any(device["type"] != cpu for device in engine.get_device_info()):
        return
    sample = Path(settings["sample_path"])
    load_writer()(Path(settings["model_path"]), sample)
    tries = [(threads, BATCH) for threads in settings["threads"]]
    best: dict[str, float] = {}
    for threads, batch in tries:
        row = {"threads": threads, "batch": batch, **measure(engine, sample, threads, batch)}
        best = max(best or row, row, key=lambda each: each["prefill"])
        output.write(json.dumps(row) + "\n")
        output.flush()
        if (threads, batch) == (settings["threads"][-1], BATCH) and best["read"] == PROMPT_TOKENS[-1]:
            # A shorter prompt is one batch of any size.
            tries += [(round(best["threads"]), batch) for batch in settings["batches"]]


def load_writer() -> Callable[[Path, Path], int]:
    """Return `write_sample` of the file next to this one, which is in no package here."""
    spec = importlib.util.spec_from_file_location("sample_file", Path(__file__).with_name("sample_file.py"))
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.write_sample


def measure(engine: Any, sample: Path, threads: int, batch: int) -> dict[str, float]:
    """Return the tokens per second of decoding and of reading a prompt; `read` is the length of that prompt."""
    params = engine.CommonParams()
    params.model.path = str(sample)
    params.n_parallel, params.n_ctx = 1, PROMPT_TOKENS[-1] + 64
    params.n_batch, params.n_ubatch = max(batch, 2048), batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = params.ui = False
    params.cache_ram_mib, params.port, params.verbosity = 0, 0, 1
    server = engine.Server(params)
    decode = ask(server, 8, DECODE_TOKENS)["predicted_per_second"]
    decode = max(decode, ask(server, 8, DECODE_TOKENS)["predicted_per_second"])
    prefill, length = 0.0, 0
    for length in PROMPT_TOKENS:
        began = time.monotonic()
        prefill = ask(server, length, 1)["prompt_per_second"]
        if time.monotonic() - began > LONG_ENOUGH_S:
            break
    return {"decode": decode, "prefill": prefill, "read": length}


def ask(server: Any, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
    request = {"prompt": [1] * prompt_tokens, "n_predict": output_tokens, "temperature": 0, "cache_prompt": False}
    return server.handle_completions({**request, "ignore_eos": True})["timings"]


if __name__ == "__main__":
    main()
