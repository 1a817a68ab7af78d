"""Sorts the pairs of rows and experts by expert, for the grouped kernels, when there are too many for `project_out`.

Each expert's pairs are then one run. One CTA an expert, and one for the pairs of padding: each reads all choices (32
kB, from L2) twice, to count those of lower experts and then to number its own.

Must meet: equal to the bit (the order within an expert too). 5 us for 8,192 pairs and 128 experts.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    launch_options,
    release_next_kernel,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

_BLOCK = 4096


@triton.jit
def route_kernel(
    order, starts, chosen_experts, pairs, experts: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    mine = tl.program_id(0)
    place = tl.arange(0, block)
    lower = tl.zeros([block], tl.int32)
    for first in range(0, pairs, block):
        expert = tl.load(chosen_experts + first + place, first + place < pairs, other=experts)
        lower += ((expert >= 0) & (expert < mine)).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(starts + mine, start)
    for first in range(0, pairs, block):
        expert = tl.load(chosen_experts + first + place, first + place < pairs, other=experts + 1)
        own = tl.where(expert < 0, experts, expert) == mine
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order + start + rank - 1, first + place, own)
        start += tl.sum(own.to(tl.int32), 0)


def route(layer: Layer, step: StepBuffers) -> None:
    """Set `order` and `starts` from `chosen_experts`."""
    pairs, experts = step.chosen_experts.numel(), layer.spec.experts
    block = min(_BLOCK, triton.next_power_of_2(pairs))
    route_kernel[(experts + 1,)](
        step.order, step.starts, step.chosen_experts, pairs, experts=experts, block=block, **launch_options(warps=8)
    )
