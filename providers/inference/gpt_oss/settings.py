"""Settings of the backends, apart from what chooses between them."""

from dataclasses import dataclass, field
from typing import Literal

from providers.inference.gpt_oss.torch_backend.runner import TorchSettings

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """`step_tokens` bounds the tokens of a plan; `torch` has the settings that both backends share. `certified_head` is
    for kernels: few rows are sampled by way of an int8 copy of the unembedding, with the same tokens."""

    backend: Backend = "torch"
    step_tokens: int = 2048
    certified_head: bool = False
    torch: TorchSettings = field(default_factory=TorchSettings)
