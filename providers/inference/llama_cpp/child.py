"""Child process of the local engine: loads one GGUF model with xllamacpp and serves it on a loopback port.

Run as a script. It reads one line of JSON settings from stdin, writes one line of JSON to stdout, either `{"address":
"http://127.0.0.1:PORT"}` or `{"error": "..."}`, and lives until its stdin ends. The kernel also ends stdin when the
parent is killed, so the child never outlives it. Nothing of this project is imported here.
"""

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

HTTP_THREADS = 64
LOG_FLUSH_S = 0.2
NGRAM_TOKENS = 8
"""Tokens that must be the same before a repetition is drafted."""


def main() -> None:
    # The engine's native code may print; only our one line may reach the parent's pipe.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=serve_model, args=(settings, output), daemon=True).start()
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


def serve_model(settings: dict[str, Any], output: Any) -> None:
    """Load the model and report its address to the parent; the engine's own threads do the rest."""
    try:
        server = start_server(settings)
        outcome = {"address": server.listening_address}
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError) as exc:
        server, outcome = None, {"error": f"{type(exc).__name__}: {exc}"}
        # The engine logs the cause from a thread of its own, and the process is about to end.
        time.sleep(LOG_FLUSH_S)
    output.write(json.dumps(outcome) + "\n")
    output.flush()
    threading.Event().wait()  # the engine lives as long as `server` does
    del server


def start_server(settings: dict[str, Any]) -> Any:
    # Untyped, and its import may fail, which must be reported to the parent.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = settings["model_path"]
    params.model_alias = {settings["model"]}
    if settings["projector_path"]:
        params.mmproj.path = settings["projector_path"]
    # Slots of their own size: in a shared cache, one request too many makes every other one fail too.
    params.n_parallel = settings["parallel"]
    params.n_ctx = settings["context_tokens"] * settings["parallel"]
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    for name, value in settings["sampling"].items():
        setattr(params.sampling, name, value)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [settings["api_key"]]
    params.n_threads_http = HTTP_THREADS
    params.cache_ram_mib = settings["prompt_cache_mib"]
    if settings["is_embedding"]:
        params.embedding = True
    if settings["reads_at_once"]:
        params.n_batch = params.n_ubatch = settings["context_tokens"]
    params.ui = False
    params.endpoint_slots = False
    params.verbosity = 1
    # The output follows an assistant message; it does not continue it.
    params.prefill_assistant = False
    # Warm-up and fitting into a GPU's memory cost a second load each; on a CPU neither helps.
    params.warmup = False
    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    params.fit_params = any(device["type"] != cpu for device in xllamacpp.get_device_info())
    if settings["drafts"]:
        set_drafts(xllamacpp, params, settings["drafts"])
    return xllamacpp.Server(params)


def set_drafts(xllamacpp: Any, params: Any, drafts: dict[str, Any]) -> None:
    """Let the engine speculate. Repetitions are sought in the slot's own tokens: a shared table of them, which the
    engine has too, would show by the time what others have sent."""
    types = xllamacpp.common_speculative_type
    # By these the parent sees that the engine speculates, and how often it is right.
    params.endpoint_slots = params.endpoint_metrics = True
    if drafts["model_path"] is None:
        params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = NGRAM_TOKENS
        params.speculative.ngram_simple.size_m = drafts["tokens"]
        return
    params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = params.speculative.draft
    draft.mparams.path, draft.n_max = drafts["model_path"], drafts["tokens"]
    draft.cpuparams.n_threads = params.cpuparams.n_threads
    draft.cpuparams_batch.n_threads = params.cpuparams_batch.n_threads


if __name__ == "__main__":
    main()
