"""Child process that prints the devices that the engine can use, as a line of JSON. It imports nothing of ours."""

import importlib
import json
import os
from typing import Any


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Untyped, and its import may fail: then there is no device but the CPU.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    rows = [
        {"name": device["name"], "free_bytes": device["memory_free"], "total_bytes": device["memory_total"]}
        for device in xllamacpp.get_device_info()
        if device["type"] != cpu
    ]
    output.write(json.dumps(rows) + "\n")
    output.flush()


if __name__ == "__main__":
    main()
