"""Embedding requests and their results: one vector per input text."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, cast

from pydantic import Discriminator, Field, Tag

from apis.wire.base import Wire
from apis.wire.text_or_tokens import TokenId, text_or_tokens_tag

MAX_INPUTS: Final = 2048
MAX_INPUT_TOKENS: Final = 8192
MAX_REQUEST_TOKENS: Final = 300_000
"""OpenAI's limits: inputs per request, tokens per input, tokens per request."""


TextInput = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_INPUT_TOKENS)]
EmbeddingInput = Annotated[
    Annotated[TextInput, Tag("a text")]
    | Annotated[list[TextInput], Field(min_length=1, max_length=MAX_INPUTS), Tag("some texts")]
    | Annotated[TokenIds, Tag("some tokens")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS), Tag("token lists")],
    Discriminator(text_or_tokens_tag),
]


class EmbeddingRequest(Wire):
    """Texts to embed, or texts as ids of the model's own tokens. `encoding_format` changes only how the numbers are
    written in the HTTP response."""

    model: str = Field(min_length=1, max_length=256)
    input: EmbeddingInput
    dimensions: int | None = Field(None, ge=1, le=2**16)
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The inputs as a list, in order; each gets one vector."""
        value = self.input
        if isinstance(value, str):
            return [value]
        if isinstance(value[0], int):
            return [cast("list[int]", value)]
        return cast("list[str] | list[list[int]]", value)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector of float32 (type code `f`) per input, in input order, all finite and of equal length. `input_tokens`
    is the total over all inputs."""

    vectors: Sequence["array[float]"]
    input_tokens: int
