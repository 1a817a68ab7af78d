"""The parts of the packaged config local-tools that this machine cannot run: `stack run local --tools` leaves them
out."""

import importlib.util
from collections.abc import Mapping
from typing import Final

from apis.errors import ConfigError
from apis.imports import install_command
from stack.doctor.machine_checks import find_sandbox_fault

PLAIN_CONFIG: Final = "local"
TOOLS_CONFIG: Final = "local-tools"
_PACKAGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vector_stores": ("files", ("apsw", "chardet", "docx", "lxml", "pypdf", "sqlite_vec")),
    "inference.providers.embeddings": ("embeddings", ("numpy", "tokenizers")),
    "tool_servers": ("mcp", ("anyio", "mcp", "mcp_types")),
}
"""By the path of a part: the extra that brings its packages, and these."""
_PAIRS: Final = {"vector_stores": "inference.providers.embeddings", "inference.providers.embeddings": "vector_stores"}
"""Parts that are of no use without each other."""


def name_tools_config(file: str) -> str:
    """Return the config that `--tools` means. Raises ConfigError for another one than `local`."""
    if file in (PLAIN_CONFIG, TOOLS_CONFIG):
        return TOOLS_CONFIG
    raise ConfigError(f"--tools belongs to `stack run local --tools`. Write the tools into {file}: stack init tools")


def find_missing_parts() -> dict[str, str]:
    """Return the parts that cannot work on this machine, by their paths in the config: each with its reason and its
    remedy."""
    missing = {
        path: f"it needs {install_command(extra)}"
        for path, (extra, packages) in _PACKAGES.items()
        if any(importlib.util.find_spec(package) is None for package in packages)
    }
    for path, other in _PAIRS.items():
        if path in missing:
            missing.setdefault(other, f"it is of no use without {path}")
    if fault := find_sandbox_fault():
        missing["tool_runtime"] = fault
    return missing
