"""Kernels run interpreted here, on the CPU; where there is a GPU, TRITON_INTERPRET=0 runs them on it."""

import os
import sys
from typing import Any, cast

# Triton reads it when it is first imported, and its own functions are then what they are.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    interpreted = cast("Any", sys.modules["triton"]).knobs.runtime.interpret
    assert interpreted, "triton was imported before TRITON_INTERPRET was set; tests/conftest.py is to set it"
