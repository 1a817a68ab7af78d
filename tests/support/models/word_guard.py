"""WordGuard: a guard model that answers by words, in the form of Llama Guard or with a list of categories."""

import json
from collections.abc import AsyncGenerator

from apis.chat import ChatRequest, TextPart
from apis.deltas import DeltaBatch, Finish, ReasoningDelta, TextDelta, Usage
from apis.errors import UpstreamError
from providers.inference.scripted import Scripted
from tests.support.models.word_judge import WORDS

CODES = {"violence": "S1", "hate": "S10", "sexual": "S12"}


class WordGuard(Scripted):
    """Names the category of each word. `broken` in an input fails, and `mumble` is answered in another form."""

    class Config(Scripted.Config):
        """The fields of `Scripted.Config`."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        self.requests.append(request)
        content = request.messages[-1].content or ""
        text = (
            content
            if isinstance(content, str)
            else " ".join(part.text for part in content if isinstance(part, TextPart))
        )
        if "broken" in text:
            raise UpstreamError("The judge is broken.")
        categories = [category for word, category in WORDS.items() if word in text]
        if "mumble" in text:
            answer = "Well, it depends."
        elif request.response_format is not None:
            answer = json.dumps({"violated": categories})
        else:
            answer = f"\n\nunsafe\n{','.join(CODES[each] for each in categories)},S6" if categories else "\n\nsafe"
        usage = Usage(len(text), len(answer))
        yield (ReasoningDelta("I kill time."), TextDelta(answer[:5]), TextDelta(answer[5:]), Finish("stop", usage))
