"""A step of the model: nothing but launches, in order, on memory that is allocated already."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from providers.inference.gpt_oss.triton_backend.kernels.attend_decode import attend_decode
from providers.inference.gpt_oss.triton_backend.kernels.attend_prefill import attend_prefill
from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_DECODE_ROWS, MAX_UNGROUPED_ROWS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.embed import embed
from providers.inference.gpt_oss.triton_backend.kernels.experts_down import experts_down
from providers.inference.gpt_oss.triton_backend.kernels.experts_up import experts_up
from providers.inference.gpt_oss.triton_backend.kernels.grouped_down import grouped_down
from providers.inference.gpt_oss.triton_backend.kernels.grouped_up import grouped_up
from providers.inference.gpt_oss.triton_backend.kernels.project_out import project_out
from providers.inference.gpt_oss.triton_backend.kernels.qkv import qkv
from providers.inference.gpt_oss.triton_backend.kernels.route import route
from providers.inference.gpt_oss.triton_backend.kernels.sample_certified import sample_certified
from providers.inference.gpt_oss.triton_backend.kernels.unembed import unembed
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights, Layer, Weights

LayerKernel = Callable[[Layer, StepBuffers], None]
EndKernel = Callable[[EndWeights, StepBuffers], None]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Launch functions of a step; a kernel's reference may take the place of any of them."""

    embed: EndKernel = embed
    qkv: LayerKernel = qkv
    attend_decode: LayerKernel = attend_decode
    attend_prefill: LayerKernel = attend_prefill
    project_out: LayerKernel = project_out
    experts_up: LayerKernel = experts_up
    experts_down: LayerKernel = experts_down
    route: LayerKernel = route
    grouped_up: LayerKernel = grouped_up
    grouped_down: LayerKernel = grouped_down
    unembed: EndKernel = unembed
    sample: EndKernel = sample_certified


TRITON: Final = Kernels()


def launch_step(
    weights: Weights, step: StepBuffers, kernels: Kernels, *, ungrouped_rows: int = MAX_UNGROUPED_ROWS
) -> None:
    """Compute a step's rows, up to `hidden` after the last layer; logits and sampling are other launches.

    A step of only singles is the same launches for all inputs, and can be captured as a graph.
    """
    rows = len(step.positions)
    kernels.embed(weights.ends, step)
    for layer in weights.layers:
        kernels.qkv(layer, step)
        if step.singles:
            kernels.attend_decode(layer, step)
        if step.singles < rows:
            kernels.attend_prefill(layer, step)
        kernels.project_out(layer, step)
        if rows > MAX_DECODE_ROWS:
            kernels.route(layer, step)
        if rows <= ungrouped_rows:
            kernels.experts_up(layer, step)
            kernels.experts_down(layer, step)
        else:
            kernels.grouped_up(layer, step)
            kernels.grouped_down(layer, step)
