"""A record of the machine of a benchmark: versions, and the card's clocks, which are read and never set."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from typing import Final

PACKAGES: Final = ("torch", "triton", "transformers", "tritonllm", "gpt_oss")
READ: Final = ("name", "driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def versions() -> dict[str, str]:
    installed = {each.metadata["Name"].replace("-", "_") for each in importlib.metadata.distributions()}
    packages = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {"python": platform.python_version(), **packages}


def clocks() -> Mapping[str, str]:
    """Return the values that nvidia-smi reports of the first card now; an empty mapping where it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(READ)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(READ, (each.strip() for each in output.split(",")), strict=False))
