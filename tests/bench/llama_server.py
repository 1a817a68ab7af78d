"""llama.cpp's own server with its own defaults, as a process: `python llama_server.py MODEL THREADS SLOTS CONTEXT`.

Prints its URL, and ends with its stdin.
"""

import importlib
import sys
from typing import Any


def main() -> None:
    xllamacpp: Any = importlib.import_module("xllamacpp")  # which has no types
    path, threads, slots, context_tokens = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx = slots, slots * context_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
