"""Kernels run interpreted here, on the CPU, at shapes as small as their edges; on a card it is test_triton_gpu."""

import os
import sys
from typing import Any, cast

# Triton reads it when it is first imported, and its own functions are then what they are.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    interpreted = cast("Any", sys.modules["triton"]).knobs.runtime.interpret
    assert interpreted, "triton was imported before TRITON_INTERPRET was set; tests/conftest.py is to set it"
