"""transformers' own gpt-oss as the oracle, and a hand on our runner: tokens in, logits out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.checkpoint import open_checkpoint
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.torch_backend.model import Placement, TorchModel
from providers.inference.gpt_oss.torch_backend.runner import DTYPES, DtypeName, TorchRunner, TorchSettings

GREEDY = RowSampling(temperature=0.0)


def reference(folder: Path) -> Any:
    """transformers' model of an unpacked checkpoint in float32."""
    modeling: Any = import_module("transformers.models.gpt_oss.modeling_gpt_oss")  # seconds: only where it is needed
    return modeling.GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: Any, tokens: Sequence[int], first_position: int = 0) -> Tensor:
    """[tokens, vocabulary], computed at once, without a cache."""
    with torch.inference_mode():
        positions = torch.arange(first_position, first_position + len(tokens)).unsqueeze(0)
        return model(torch.tensor([list(tokens)]), position_ids=positions, use_cache=False).logits[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return float(difference.square().sum().sqrt() / expected.double().square().sum().sqrt())


class Watched(TorchModel):
    """A model that keeps the logits of its last step."""

    logits: Tensor | None = None

    def forward(self, batch: Any, memory: Any) -> Tensor:
        self.logits = super().forward(batch, memory)
        # The sampler uses its logits up.
        return self.logits.clone()


@dataclass
class Hand:
    """Drives a runner by hand: pages are given out in a scattered order, a sequence at a time or many in a step."""

    runner: TorchRunner
    model: Watched
    tables: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    used: int = 0

    def open(self, slot: int, sampling: RowSampling = GREEDY, prompt: Sequence[int] = ()) -> None:
        self.tables[slot] = []
        self.runner.open(slot, sampling, prompt, ())

    def row(self, slot: int, start: int, tokens: Sequence[int], *, samples: bool = True) -> PlanRow:
        table = self.tables[slot]
        while len(table) * self.runner.page_tokens < start + len(tokens):
            # 7 has no factor in common with the page counts used here, so this visits every page once.
            table.append(self.used * 7 % self.runner.page_count)
            self.used += 1
        return PlanRow(slot, start, tokens, table, samples)

    def step(self, *rows: PlanRow, masks: Mapping[int, bytes] | None = None) -> Mapping[int, SampledToken]:
        ordered = sorted(rows, key=lambda row: len(row.tokens) > 1)
        return self.runner.step(Plan(ordered), masks or {})

    def logits(self, *rows: PlanRow) -> Tensor:
        self.step(*rows)
        assert self.model.logits is not None
        return self.model.logits


def hand(folder: Path, dtype: DtypeName = "float32", together_bytes: int = 2**25, **settings: Any) -> Hand:
    """A runner of a checkpoint with memory full of numbers that are none."""
    # Models this small gain nothing from more, and lose much where other tests run at the same time.
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"context_tokens": 1024, "slots": 8, "device": "cpu", "dtype": dtype} | settings
    expected = TorchSettings(**chosen)
    model = Watched(open_checkpoint(folder), Placement(torch.device("cpu"), DTYPES[dtype], together_bytes))
    runner = TorchRunner(model, expected)
    runner.memory.keys.fill_(torch.nan)
    runner.memory.values.fill_(torch.nan)
    return Hand(runner, model)
