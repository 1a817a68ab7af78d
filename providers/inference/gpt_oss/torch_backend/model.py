"""gpt-oss in torch: the reference forward over a ragged batch, on any device, weights as they are on disk.

Source: openai/gpt-oss, gpt_oss/torch/model.py. float32 and float64 are oracles, bfloat16 is the type it was trained in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from providers.inference.gpt_oss.checkpoint.checkpoint import (
    DenseExperts,
    Experts,
    LayerTensors,
    ModelCheckpoint,
    PackedExperts,
    Progress,
)
from providers.inference.gpt_oss.checkpoint.mxfp4 import UnpackScratch, unpack
from providers.inference.gpt_oss.checkpoint.spec import LayerKind
from providers.inference.gpt_oss.torch_backend.attention import AttentionPlan, PageMemory, attend, rotary_table, rotate

MAX_UNPACKED_BYTES: Final = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and type that a model computes on. A matrix of all experts that takes at most `max_unpacked_bytes` is
    stored unpacked and used in one product; larger ones stay as they are on disk, and are unpacked expert by expert."""

    device: torch.device
    dtype: torch.dtype
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type of norms, softmax and sinks."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """Tokens [T] of several sequences, their `positions` [T] and `kv_offsets` in the page memory [T]; `sample_rows` [S]
    are the tokens whose logits are needed, `attention_plans` the groups to attend in each kind of layer."""

    tokens: Tensor
    positions: Tensor
    kv_offsets: Tensor
    sample_rows: Tensor
    attention_plans: Mapping[LayerKind, AttentionPlan]


class TorchModel:
    """The weights and the forward pass."""

    def __init__(
        self, checkpoint: ModelCheckpoint, placement: Placement, progress: Callable[[Progress], None] | None = None
    ) -> None:
        """Load layer by layer. Raises ConfigError naming the tensor and file where one is damaged."""
        self.spec = checkpoint.spec
        self.placement = placement
        self._layers: Sequence[LayerTensors] = [self._place_layer(layer) for layer in checkpoint.read_layers(progress)]
        ends = checkpoint.read_ends()
        self._embedding = self._place_tensor(ends.embedding)
        self._unembedding = (
            self._embedding if ends.unembedding is ends.embedding else self._place_tensor(ends.unembedding)
        )
        self._norm = ends.norm.to(placement.device, placement.sum_dtype)
        self._scratch = self._expert_scratch()
        cosines, sines = rotary_table(self.spec.rotary, self.spec.head_dim, self.spec.context_tokens)
        self._cosines = cosines.to(placement.device)
        self._sines = sines.to(placement.device)

    def forward(self, batch: TorchBatch, memory: PageMemory) -> Tensor:
        """Store the batch's keys and values, and return the logits [S, vocabulary] of its sampled tokens."""
        hidden = embedding(batch.tokens, self._embedding)
        cosines = self._cosines[batch.positions].unsqueeze(1).to(hidden.dtype)
        sines = self._sines[batch.positions].unsqueeze(1).to(hidden.dtype)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            hidden = hidden + self._attention(index, normed, batch, (cosines, sines), memory)
            hidden = hidden + self._compute_experts(layer, self._rms_norm(hidden, layer.mlp_norm))
        return linear(self._rms_norm(hidden.index_select(0, batch.sample_rows), self._norm), self._unembedding)

    def _attention(
        self, index: int, normed_hidden: Tensor, batch: TorchBatch, rotation: tuple[Tensor, Tensor], memory: PageMemory
    ) -> Tensor:
        spec, layer = self.spec, self._layers[index]
        projected = linear(normed_hidden, layer.qkv_weight, layer.qkv_bias).view(len(normed_hidden), -1, spec.head_dim)
        turned = rotate(projected[:, : spec.heads + spec.kv_heads], *rotation)
        queries, keys = turned[:, : spec.heads], turned[:, spec.heads :]
        memory.write(index, batch.kv_offsets, keys, projected[:, spec.heads + spec.kv_heads :])
        attention_output = attend(queries, memory, index, layer.sinks, batch.attention_plans[spec.layers[index]])
        return linear(attention_output, layer.out_weight, layer.out_bias)

    def _compute_experts(self, layer: LayerTensors, normed_hidden: Tensor) -> Tensor:
        scores = linear(normed_hidden, layer.router_weight, layer.router_bias)
        best, chosen = scores.topk(self.spec.experts_per_token, dim=-1)
        shares = best.softmax(dim=-1)
        if isinstance(layer.gate_up, DenseExperts) and isinstance(layer.down, DenseExperts) and self._fits_unpacked():
            outputs = self._compute_all_experts(layer.gate_up, layer.down, normed_hidden, chosen)
        else:
            outputs = self._compute_each_expert(layer, normed_hidden, chosen)
        return (shares.unsqueeze(1) @ outputs).squeeze(1)

    def _compute_all_experts(
        self, gate_up: DenseExperts, down: DenseExperts, normed_hidden: Tensor, chosen_experts: Tensor
    ) -> Tensor:
        """Return [T, chosen, hidden] by one product over all experts, each with as many rows as the busiest needs."""
        flat = chosen_experts.flatten()
        order = flat.argsort(stable=True)
        of_expert = flat[order]
        counts = torch.bincount(flat, minlength=self.spec.experts)
        place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[of_expert]
        inputs = normed_hidden.new_zeros(self.spec.experts, int(counts.max()), normed_hidden.shape[-1])
        inputs[of_expert, place] = normed_hidden[order // chosen_experts.shape[1]]
        inner = self._swiglu(torch.baddbmm(gate_up.bias.unsqueeze(1), inputs, gate_up.weight))
        expert_outputs = torch.baddbmm(down.bias.unsqueeze(1), inner, down.weight)
        outputs = normed_hidden.new_empty(len(flat), normed_hidden.shape[-1])
        outputs[order] = expert_outputs[of_expert, place]
        return outputs.view(*chosen_experts.shape, -1)

    def _compute_each_expert(self, layer: LayerTensors, normed_hidden: Tensor, chosen_experts: Tensor) -> Tensor:
        """Return [T, chosen, hidden], one chosen expert after the other."""
        flat = chosen_experts.flatten()
        counts: list[int] = cast("Any", torch.bincount(flat, minlength=self.spec.experts)).tolist()
        parts = torch.split(flat.argsort(stable=True), counts)
        outputs = normed_hidden.new_empty(len(flat), normed_hidden.shape[-1])
        for expert, pairs in enumerate(parts):
            if len(pairs):
                inner = self._swiglu(
                    self._multiply_expert(layer.gate_up, expert, normed_hidden[pairs // chosen_experts.shape[1]])
                )
                outputs[pairs] = self._multiply_expert(layer.down, expert, inner)
        return outputs.view(*chosen_experts.shape, -1)

    def _multiply_expert(self, experts: Experts, expert: int, inputs: Tensor) -> Tensor:
        if isinstance(experts, DenseExperts):
            return torch.addmm(experts.bias[expert], inputs, experts.weight[expert])
        weight = unpack(experts.blocks[expert], experts.scales[expert], inputs.dtype, self._scratch)
        return linear(inputs, weight, experts.bias[expert])

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        limit = self.spec.swiglu_limit
        gate = gate_up[..., 0::2].clamp(max=limit)
        line = gate_up[..., 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(gate * self.spec.swiglu_alpha) * (line + 1)

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.to(weight.dtype)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.spec.norm_eps)
        return (wide * scale * weight).to(hidden.dtype)

    def _fits_unpacked(self) -> bool:
        weights = 2 * self.spec.experts * self.spec.intermediate * self.spec.hidden
        return weights * self.placement.dtype.itemsize <= self.placement.max_unpacked_bytes

    def _expert_scratch(self) -> UnpackScratch | None:
        if not any(isinstance(layer.gate_up, PackedExperts) for layer in self._layers):
            return None
        weights = 2 * self.spec.intermediate * self.spec.hidden
        return UnpackScratch(weights, self.placement.dtype, self.placement.device)

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.placement.device, self.placement.dtype)

    def _place_layer(self, layer: LayerTensors) -> LayerTensors:
        summed = {"attention_norm", "mlp_norm", "sinks"}
        tensors = {
            field.name: self._place_tensor(getattr(layer, field.name))
            for field in fields(layer)
            if field.name not in summed | {"gate_up", "down"}
        }
        tensors |= {name: getattr(layer, name).to(self.placement.device, self.placement.sum_dtype) for name in summed}
        return LayerTensors(**tensors, gate_up=self._place_experts(layer.gate_up), down=self._place_experts(layer.down))

    def _place_experts(self, experts: Experts) -> Experts:
        bias = self._place_tensor(experts.bias)
        if isinstance(experts, DenseExperts):
            return DenseExperts(self._place_tensor(experts.weight), bias)
        blocks, scales = (tensor.to(self.placement.device) for tensor in (experts.blocks, experts.scales))
        if self._fits_unpacked():
            return DenseExperts(unpack(blocks, scales, self.placement.dtype).transpose(1, 2), bias)
        return PackedExperts(blocks, scales, bias)
