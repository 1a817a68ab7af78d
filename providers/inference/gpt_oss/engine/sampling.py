"""Sampling parameters of one sequence, and the token that sampling returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A sequence's sampling parameters, resolved: no field means "the default".

    Order: penalties, `logit_bias`, the row's mask, temperature, then `top_k`, `top_p`, `min_p`. `temperature` 0 is
    greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Presence and frequency penalties count generated tokens only,
    the repetition penalty the prompt's too. The token at position p depends on (`seed`, p) and its logits alone, never
    on the other rows of the batch. `logprobs` is the number of likeliest alternatives to report (0: the chosen token's
    alone), None for none at all; with it the tokens `score_ids` are reported too, in their order.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    score_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. If the row requests logprobs: its natural-log probability, the likeliest (token, logprob), best
    first, and the log probabilities of its `score_ids`, -inf for one that the model does not have."""

    token: int
    logprob: float | None = None
    top_logprobs: Sequence[tuple[int, float]] = ()
    scores: Sequence[float] = ()
