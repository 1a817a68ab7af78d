"""How many pages of keys and values there are, and how long a context may get: from what was asked for and what is
free. No torch."""

from dataclasses import dataclass
from typing import Final

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.sizing.fit import MIN_CONTEXT_TOKENS

KV_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class KvRequest:
    """Of `slots` sequences with `context_tokens` each, in `kv_memory_gib`; None for what the model and memory allow."""

    slots: int
    context_tokens: int | None
    kv_memory_gib: float | None


def int8_unembedding_bytes(spec: ModelSpec) -> int:
    """Of the unembedding's int8 copy (see `kernels.narrow`): a byte for each weight, three float32 for each row."""
    return spec.vocabulary * (spec.hidden + 3 * 4)


def kv_pages(
    spec: ModelSpec, request: KvRequest, page_bytes: int, page_tokens: int, free_bytes: int
) -> tuple[int, int]:
    """Pages, and the longest context. Raises ConfigError where they hold no useful one, saying what to change."""
    context = min(request.context_tokens or spec.context_tokens, spec.context_tokens)
    pages = request.slots * -(-context // page_tokens)
    given = request.kv_memory_gib
    memory = KV_SHARE * free_bytes if given is None else given * 2**30
    pages = min(pages, int(memory // page_bytes))
    least = context if request.context_tokens else min(context, MIN_CONTEXT_TOKENS)
    if pages * page_tokens < least:
        which = f"{memory / 2**30:.2f} GiB " + ("of free memory" if given is None else "(kv_memory_gib)")
        raise ConfigError(
            f"{which} holds the keys and values of {pages * page_tokens} tokens, fewer than {least}. Lower "
            "context_tokens, raise kv_memory_gib, or take a smaller model."
        )
    return pages, min(context, pages * page_tokens)
