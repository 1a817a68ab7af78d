"""WordJudge: a scripted chat model that also decides, by words: each names the category that it belongs to."""

from collections.abc import Mapping
from typing import Final

from apis.chat import ImagePart, TextPart
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Usage
from apis.errors import UpstreamError
from apis.moderation import CATEGORIES, Category
from providers.inference.scripted import Scripted

WORDS: Final[Mapping[str, Category]] = {"kill": "violence", "scum": "hate", "teapot": "sexual"}
HIGH, LOW = 0.9, 0.1


class WordJudge(Scripted):
    """The scripted model, which finds a category likely where the input has its word. An image is `sexual`; `broken`
    in an input fails."""

    class Config(Scripted.Config):
        """The fields of `Scripted.Config`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.judged: list[DecisionRequest] = []

    async def decide(self, request: DecisionRequest) -> Decisions:
        self.judged.append(request)
        texts = " ".join(part.text for part in request.input if isinstance(part, TextPart))
        if "broken" in texts:
            raise UpstreamError("The judge is broken.")
        flagged = {category for word, category in WORDS.items() if word in texts}
        if any(isinstance(part, ImagePart) for part in request.input):
            flagged.add("sexual")
        scores = [HIGH if category in flagged else LOW for category in CATEGORIES]
        return Decisions([(score, 1 - score) for score in scores], Usage(len(texts), len(request.questions)))
