"""GuardModeration: moderation by a guard model, a chat model that says itself what is wrong with an input."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal, cast

from pydantic import Field

from apis.chat import ChatRequest, Message
from apis.deltas import Finish, TextDelta, Usage
from apis.errors import UpstreamError
from apis.inference import Inference
from apis.moderation import CATEGORIES, Category, ContentPart, ModerationScores
from providers.moderation.pieces import JUDGE_INSTRUCTIONS, PieceModeration

GuardForm = Literal["llama_guard", "policy"]
_LLAMA_GUARD_CODES: Final[Mapping[str, Sequence[Category]]] = {
    "S1": ("violence", "illicit/violent"),
    "S2": ("illicit",),
    "S3": ("sexual",),
    "S4": ("sexual/minors",),
    "S5": ("harassment",),
    "S9": ("illicit/violent",),
    "S10": ("hate",),
    "S11": ("self-harm",),
    "S12": ("sexual",),
    "S14": ("illicit",),
}
"""The categories for the codes of Llama Guard 3 and 4. None of ours fits advice (S6), privacy (S7), property (S8) and
elections (S13)."""
_CODE: Final = re.compile(r"\bS\d{1,3}\b")
_ANSWER_SCHEMA: Final = {
    "type": "object",
    "properties": {"violated": {"type": "array", "items": {"type": "string", "enum": [*CATEGORIES]}}},
    "required": ["violated"],
    "additionalProperties": False,
}
_POLICY_TASK: Final = (
    'Answer with a JSON object: its list "violated" has the names of the categories whose statement is true of the '
    "input. It is empty if none is.\n\n# Categories\n\n"
)


class GuardModeration(PieceModeration):
    """Lets a guard model answer, once for each piece. The score of a category is 1 where the model names it, else 0."""

    class Config(PieceModeration.Config):
        """`form` is how `model` answers. `llama_guard`: `safe`, or `unsafe` and the codes of its own categories, as
        Llama Guard 3 and 4 do. `categories` says which of ours a code means, in place of the built-in ones. `policy`:
        the model reads the statements of all categories, and names those that are true, as gpt-oss-safeguard and
        large chat models can. An answer, its reasoning included, may have `max_tokens`."""

        form: GuardForm
        categories: dict[str, tuple[Category, ...]] = Field(default_factory=dict[str, tuple[Category, ...]])
        max_tokens: int = Field(default=2048, ge=16, le=100_000)

    def __init__(self, config: Config, inference: Inference) -> None:
        super().__init__(config, inference)
        self._form = config.form
        self._max_tokens = config.max_tokens
        self._codes = {**_LLAMA_GUARD_CODES, **config.categories}
        listed = "\n".join(f"- {category}: {self._statements[category]}" for category in CATEGORIES)
        self._policy = f"{JUDGE_INSTRUCTIONS}\n\n{_POLICY_TASK}{listed}"

    async def _judge_piece(self, piece: Sequence[ContentPart], param: str, cache_salt: str | None) -> ModerationScores:
        text, usage = await self._ask(piece, cache_salt)
        flagged = self._read_codes(text) if self._form == "llama_guard" else _read_list(text)
        return self._build_scores(dict.fromkeys(flagged, 1.0), flagged, piece, usage)

    async def _ask(self, piece: Sequence[ContentPart], cache_salt: str | None) -> tuple[str, Usage]:
        """Return what the model says of a piece, and the tokens that it has used."""
        messages = [Message(role="user", content=[*piece])]
        fields: dict[str, Any] = {}
        if self._form == "policy":
            messages.insert(0, Message(role="system", content=self._policy))
            json_schema = {"name": "moderation", "schema": _ANSWER_SCHEMA, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        request = ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": messages,
                "temperature": 0.0,
                "max_completion_tokens": self._max_tokens,
                "cache_salt": cache_salt,
                **fields,
            }
        )
        texts: list[str] = []
        usage = Usage()
        async with aclosing(self._inference.chat(request)) as batches:
            async for batch in batches:
                texts += [delta.text for delta in batch if isinstance(delta, TextDelta)]
                usage = next((delta.usage for delta in batch if isinstance(delta, Finish)), usage)
        return "".join(texts).strip(), usage

    def _read_codes(self, text: str) -> frozenset[Category]:
        """Return the categories that an answer of Llama Guard names. Raises UpstreamError for any other answer."""
        verdict = text[:6].lower()
        if verdict.startswith("safe"):
            return frozenset()
        if verdict != "unsafe":
            raise UpstreamError("The guard model said neither 'safe' nor 'unsafe'.")
        return frozenset(category for code in _CODE.findall(text) for category in self._codes.get(code, ()))


def _read_list(text: str) -> frozenset[Category]:
    """Return the categories that an answer lists. Raises UpstreamError for any other answer."""
    try:
        answer: Any = json.loads(text)
        violated = cast("list[object]", answer["violated"])
        names = frozenset(violated)
    except (ValueError, TypeError, LookupError, RecursionError):
        raise UpstreamError("The guard model did not answer with a list of categories.") from None
    return frozenset(category for category in CATEGORIES if category in names)
