"""The `logit_bias` of a request over the gpt-oss vocabulary."""

from collections.abc import Mapping
from typing import Final

from apis.errors import InvalidRequest
from providers.inference.harmony.vocabulary import VOCABULARY_SIZE

MAX_LOGIT_BIAS: Final = 100.0


def parse_logit_bias(logit_bias: Mapping[str, float]) -> dict[int, float]:
    """Return the bias by token id. Raises InvalidRequest for a token that does not exist, and for a bias beyond
    MAX_LOGIT_BIAS."""
    biases: dict[int, float] = {}
    for token, bias in logit_bias.items():
        if not (token.isascii() and token.isdecimal() and int(token) < VOCABULARY_SIZE):
            raise InvalidRequest(f"'{token}' is no token of this model.", param="logit_bias", code="invalid_value")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"A bias lies between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}.",
                param="logit_bias",
                code="invalid_value",
            )
        biases[int(token)] = bias
    return biases
