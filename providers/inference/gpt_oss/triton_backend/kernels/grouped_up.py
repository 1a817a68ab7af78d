"""Kernel 4 of a layer: the experts' first matrix as a grouped product, with SwiGLU: decoding in batches, and prefill.

The kernel of `experts_up` for tiles of an expert's pairs, found along `order`; an expert without pairs costs nothing.
The weights are the left operand, unpacked in the loop; the pairs are the right one: 16 or 32 of them when decoding
(twice an expert's average), 64 or 128 in prefill. There are as many CTAs as there could be tiles: those too many end at
once, and the card balances the others by itself.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. At most 4.0 instructions a
weight in the inner loop of decoding on sm_90, 2.1 of them of integers; at 32 rows of the smaller model 65 % of 4.3
TB/s. 45 % of 790 TFLOP/s for 2,048 tokens of it (256 pairs an expert).
"""

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.experts_up import launch_up
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import choose_expert_tiling
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer


def grouped_up(layer: Layer, step: StepBuffers) -> None:
    """Do the work of `experts_up`, with each expert's pairs read from `order` and `starts`."""
    launch_up(layer, step, choose_expert_tiling(step, layer.spec))
