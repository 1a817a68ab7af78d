"""Kernel 5 of a layer: the experts' second matrix as a grouped product, their weighted sum, the residual sum.

The kernel of `experts_down`, for tiles of pairs as in `grouped_up`. A pair's output goes to `partials` in float32, and
the CTA that finishes a row's last pair sums them in the order of `chosen_experts`: without atomic sums, so the result
is the same every time. In prefill a kernel of its own sums them: the tiles are too large for the registers that it
takes.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16; the same bits every time.
Instructions, bandwidth and rate as `grouped_up`.
"""

from typing import Final

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.experts_down import (
    launch_down,
)
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import choose_expert_tiling
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

MAX_COLUMNS: Final = 64
"""The widest tile. With tiles twice as wide a multiprocessor runs only one CTA: the sums' addresses take registers."""


def grouped_down(layer: Layer, step: StepBuffers) -> None:
    """Do the work of `experts_down`, with each expert's pairs read from `order` and `starts`."""
    launch_down(layer, step, choose_expert_tiling(step, layer.spec, MAX_COLUMNS))
