"""One ranking out of several: reciprocal rank fusion (Cormack, Clarke, Büttcher 2009), scaled to 0..1."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

RANK_CONSTANT: Final = 60
"""How little the first places count more than the next ones: 60, as in the paper."""

KeyT = TypeVar("KeyT", bound=Hashable)
ScoredRanking = Sequence[tuple[KeyT, float]]
"""Best first, each with how much its being there says: from 0, chance, to 1."""


def fuse_rankings(rankings: Sequence[tuple[float, ScoredRanking[KeyT]]]) -> Mapping[KeyT, float]:
    """What each key of these weighted rankings scores: 1 is first in all of them. Best first; equals as they came."""
    scores: dict[KeyT, float] = {}
    most = sum(weight for weight, _ in rankings) / (RANK_CONSTANT + 1)
    for weight, ranking in rankings:
        for rank, (key, says) in enumerate(ranking, start=1):
            scores[key] = scores.get(key, 0.0) + weight * says / (RANK_CONSTANT + rank)
    ranked = sorted(scores.items(), key=lambda each: -each[1])
    return {key: min(1.0, score / most) if most else 0.0 for key, score in ranked}
