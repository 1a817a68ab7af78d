"""Kernels run interpreted here, on the CPU, at shapes as small as their edges; on a card it is test_triton_gpu."""

import os
import sys
from typing import Any, Final, cast

import pytest

# Triton reads it when it is first imported, and its own functions are then what they are.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    interpreted = cast("Any", sys.modules["triton"]).knobs.runtime.interpret
    assert interpreted, "triton was imported before TRITON_INTERPRET was set; tests/conftest.py is to set it"

ARCHITECTURE: Final = 90
"""The suite compiles for this one, H100 and H200; the marker `long` adds the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the kernels that are compiled for another architecture as long."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("architecture", ARCHITECTURE) != ARCHITECTURE:
            item.add_marker(pytest.mark.long)
