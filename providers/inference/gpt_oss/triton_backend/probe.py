"""Probes Triton: compiles and runs the smallest kernel, before minutes are spent on loading a model.

It detects a missing C compiler or header, a driver that is too old, a card that this Triton does not know yet, and a
Triton whose language is too old or too new.
"""

import importlib
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch

from apis.imports import import_from_string

_MAX_ERROR_CHARS = 300


def probe_triton(device: torch.device) -> str | None:
    """Return why kernels cannot run on `device`; None where they can. Takes a second or two."""
    broken: type[Exception] = cast("Any", importlib.import_module("triton")).TritonError
    try:
        norm_rows: Callable[..., None] = import_from_string(
            "providers.inference.gpt_oss.triton_backend.kernels.norm:norm_rows"
        )
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            numbers = torch.ones(1, 16, device=device)
            norm_rows(torch.empty_like(numbers), numbers, torch.ones(16, device=device), 1e-5)
            numbers.sum().item()  # an error on the device is raised here
    except (RuntimeError, AttributeError, ImportError, OSError, ValueError, subprocess.SubprocessError, broken) as exc:
        message = " ".join(str(exc).split())[:_MAX_ERROR_CHARS]
        return f"Triton cannot run a kernel: {type(exc).__name__}: {message}."
    return None
