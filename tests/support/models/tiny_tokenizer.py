"""The Harmony vocabulary as a Hugging Face tokenizer: vLLM needs it in addition to a model's weights."""

import json
from pathlib import Path
from typing import Any, Final

from providers.inference.harmony.vocabulary import Vocabulary

ORDINARY: Final = 199998
"""Ids below this stand for bytes; from here on they are control tokens."""
NAMED: Final = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
SIZE: Final = 201088
PATTERN: Final = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How o200k_base cuts a text into words (tiktoken, tiktoken_ext/openai_public.py)."""


def save_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    ranks = {vocabulary.decode_bytes(token): token for token in range(ORDINARY)}
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    added = [
        {"id": token, "content": NAMED.get(token, f"<|reserved_{token}|>"), "special": True, **_PLAIN}
        for token in range(ORDINARY, SIZE)
    ]
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]},
        "post_processor": None,
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [(spelled(first), spelled(right)) for first, right in _merges(ranks)],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": NAMED[199998],
        "eos_token": NAMED[200002],
        "pad_token": NAMED[199999],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_PLAIN: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that ranks imply, the earliest first: each way to cut a token into two tokens."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        usable = [(first, right) for first, right in pairs if first in ranks and right in ranks]
        merges += sorted(usable, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be seen, otherwise one from 256 on."""
    letters = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in letters else next(hidden)) for byte in range(256)]
