"""PredicateModeration: moderation by the decisions of a model, one predicate for each category."""

from collections.abc import Sequence

from pydantic import Field

from apis.chat import TextPart
from apis.decisions import DecisionQuestion, DecisionRequest, predicate_options
from apis.errors import UpstreamError
from apis.inference import Inference
from apis.moderation import CATEGORIES, Category, ContentPart, ModerationScores
from providers.moderation.pieces import JUDGE_INSTRUCTIONS, PieceModeration


class PredicateModeration(PieceModeration):
    """Asks a model that makes decisions how likely a statement about the input is true, for each category."""

    class Config(PieceModeration.Config):
        """`model` makes decisions: a decision model or any chat model. A category is flagged from its entry of
        `thresholds` on, else from `threshold`."""

        threshold: float = Field(default=0.5, gt=0, le=1)
        thresholds: dict[Category, float] = Field(default_factory=dict[Category, float])

    def __init__(self, config: Config, inference: Inference) -> None:
        super().__init__(config, inference)
        self._thresholds = {category: config.thresholds.get(category, config.threshold) for category in CATEGORIES}
        self._questions = [
            DecisionQuestion(
                kind="predicate",
                instructions=[TextPart(text=self._statements[category])],
                options=predicate_options(),
                param="input",
            )
            for category in CATEGORIES
        ]

    async def _judge_piece(self, piece: Sequence[ContentPart], param: str, cache_salt: str | None) -> ModerationScores:
        request = DecisionRequest(
            model=self.model,
            instructions=JUDGE_INSTRUCTIONS,
            input=[*piece],
            input_param=param,
            questions=self._questions,
            cache_salt=cache_salt,
        )
        decisions = await self._inference.decide(request)
        scores: dict[Category, float] = {}
        for category, options in zip(CATEGORIES, decisions.probabilities, strict=True):
            if options is None:
                raise UpstreamError(f"The moderation model did not judge '{category}'.")
            scores[category] = options[0]
        flagged: set[Category] = {each for each, score in scores.items() if score >= self._thresholds[each]}
        return self._build_scores(scores, frozenset(flagged), piece, decisions.usage)
