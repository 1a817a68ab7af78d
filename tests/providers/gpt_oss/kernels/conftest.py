"""Kernels run interpreted here, on the CPU, at shapes as small as their edges; on a card it is test_triton_gpu."""

import os
import sys
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch

# Triton reads it when it is first imported, and its own functions are then what they are.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    interpreted = cast("Any", sys.modules["triton"]).knobs.runtime.interpret
    assert interpreted, "triton was imported before TRITON_INTERPRET was set; tests/conftest.py is to set it"

ARCHITECTURE: Final = 90
"""The suite compiles for this one, H100 and H200; the marker `long` adds the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the kernels that are compiled for another architecture, and those that run on float32 where the same
    test runs on bfloat16, the type of every checkpoint."""
    files = {path for path in {item.path for item in items} if path.parent == Path(__file__).parent}
    kernels = [item for item in items if item.path in files]
    on_bfloat16 = {_name_without_parameters(item) for item in kernels if _parameter(item, "dtype") == torch.bfloat16}
    for item in kernels:
        is_repeated = _parameter(item, "dtype") == torch.float32 and _name_without_parameters(item) in on_bfloat16
        if is_repeated or _parameter(item, "architecture") not in (None, ARCHITECTURE):
            item.add_marker(pytest.mark.long)


def _parameter(item: pytest.Item, name: str) -> object:
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


def _name_without_parameters(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
