"""Sizes the key-value memory, pages and longest context, from the configuration and the free memory. No torch."""

from dataclasses import dataclass
from typing import Final

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.sizing.fit import MIN_CONTEXT_TOKENS

KV_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class KvRequest:
    """Requested size: `slots` sequences with `context_tokens` each, in `kv_memory_gib`; None for the model's maximum,
    as far as memory allows."""

    slots: int
    context_tokens: int | None
    kv_memory_gib: float | None


def int8_unembedding_bytes(spec: ModelSpec) -> int:
    """Return the size of the unembedding's int8 copy (see `kernels.narrow`): a byte for each weight, three float32 for
    each row."""
    return spec.vocabulary * (spec.hidden + 3 * 4)


def kv_pages(
    spec: ModelSpec, request: KvRequest, page_bytes: int, page_tokens: int, free_bytes: int
) -> tuple[int, int]:
    """Return the pages and the longest context. Raises ConfigError, with the remedy, where they hold no useful one."""
    context = min(request.context_tokens or spec.context_tokens, spec.context_tokens)
    pages = request.slots * -(-context // page_tokens)
    kv_memory_gib = request.kv_memory_gib
    memory = KV_SHARE * free_bytes if kv_memory_gib is None else kv_memory_gib * 2**30
    pages = min(pages, int(memory // page_bytes))
    min_tokens = context if request.context_tokens else min(context, MIN_CONTEXT_TOKENS)
    held_tokens = pages * page_tokens
    if held_tokens < min_tokens:
        source = "of free memory" if kv_memory_gib is None else "(kv_memory_gib)"
        raise ConfigError(
            f"{memory / 2**30:.2f} GiB {source} holds the keys and values of {held_tokens} tokens, fewer than "
            f"{min_tokens}. Lower context_tokens, raise kv_memory_gib, or take a smaller model."
        )
    return pages, min(context, held_tokens)
