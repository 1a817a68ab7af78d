"""Our forward pass against transformers' own, from files in every layout, however the tokens are cut into steps."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.layout import Layout
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec, Rotary
from providers.inference.gpt_oss.torch_backend.attention import rotary_table
from providers.inference.gpt_oss.torch_backend.runner import DtypeName
from tests.support.models.gpt_oss_reference import Hand, hand, reference, reference_logits, relative_error
from tests.support.models.random_checkpoints import TINY, SaveFormat, tiny_spec_with, write_checkpoint

TOLERANCE = 1e-5
TWO_LAYERS = TINY.layers[:2]
TOKENS = [(7 * place * place + 3 * place) % TINY.vocabulary for place in range(100)]


def written(folder: Path, spec: ModelSpec, layout: Layout, shards: int = 1) -> Path:
    folder /= f"{layout}-{shards}"
    if not folder.exists():
        write_checkpoint(folder, spec, SaveFormat(layout, shards))
    return folder


def expected_logits(folder: Path, spec: ModelSpec, tokens: Sequence[int]) -> Tensor:
    return reference_logits(reference(written(folder, spec, "dense")), tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, expected_logits(folder, TINY, TOKENS)


def chunked(runner: Hand, tokens: Sequence[int], size: int) -> Tensor:
    """The logits after each chunk."""
    runner.open(0)
    starts = range(0, len(tokens), size)
    return torch.cat([runner.logits(runner.row(0, start, tokens[start : start + size])) for start in starts])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", ["openai", "transformers", "dense"])
def test_every_layout_gives_the_references_logits(tiny: tuple[Path, Tensor], layout: Layout, shards: int) -> None:
    folder, expected = tiny
    runner = hand(written(folder, TINY, layout, shards))
    assert relative_error(chunked(runner, TOKENS, len(TOKENS)), expected[-1:]) < TOLERANCE


def test_transformers_reads_the_packed_layout_as_the_same_model(tiny: tuple[Path, Tensor]) -> None:
    folder, expected = tiny
    packed = reference(written(folder, TINY, "transformers"))
    assert relative_error(reference_logits(packed, TOKENS), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "together_bytes", "size"),
    [  # any two values meet
        ("openai", 0, 1),
        ("dense", 2**25, 1),
        ("openai", 2**25, 7),
        ("dense", 0, 7),
        ("openai", 2**25, 64),
        ("dense", 0, 64),
    ],
)
def test_chunks_give_the_references_logits(
    tiny: tuple[Path, Tensor], layout: Layout, together_bytes: int, size: int
) -> None:
    folder, expected = tiny
    runner = hand(written(folder, TINY, layout), together_bytes=together_bytes)
    ends = [min(start + size, len(TOKENS)) - 1 for start in range(0, len(TOKENS), size)]
    logits = chunked(runner, TOKENS, size)
    assert relative_error(logits, expected[ends]) < TOLERANCE
    assert max(map(relative_error, logits, expected[ends])) < TOLERANCE


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40])
def test_windows_cross_page_edges_at_every_offset(tmp_path: Path, window: int) -> None:
    spec = tiny_spec_with(layers=TWO_LAYERS, window=window, experts=4, experts_per_token=2)
    expected = expected_logits(tmp_path, spec, TOKENS[:52])
    runner = hand(written(tmp_path, spec, "openai"), slots=18)
    for slot in range(18):
        runner.open(slot)
        first = runner.logits(runner.row(slot, 0, TOKENS[: slot + 1]))
        assert relative_error(first, expected[slot : slot + 1]) < TOLERANCE
    for further in range(1, 34):
        rows = [runner.row(slot, slot + further, [TOKENS[slot + further]]) for slot in range(18)]
        assert relative_error(runner.logits(*rows), expected[further : further + 18]) < TOLERANCE


def test_decoding_and_prefilling_share_a_step(tiny: tuple[Path, Tensor]) -> None:
    folder, expected = tiny
    runner = hand(written(folder, TINY, "openai"), scratch_mib=0)
    for slot in range(4):
        runner.open(slot)
    runner.step(runner.row(0, 0, TOKENS[:33], samples=False), runner.row(1, 0, TOKENS[:15], samples=False))
    logits = runner.logits(
        runner.row(0, 33, TOKENS[33:34]),
        runner.row(1, 15, TOKENS[15:16]),
        runner.row(2, 0, TOKENS[:1]),
        runner.row(3, 0, TOKENS[:50]),
    )
    assert relative_error(logits, expected[[33, 15, 0, 49]]) < TOLERANCE


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec_with(
            hidden=96, intermediate=32, heads=6, kv_heads=3, experts=32, layers=TWO_LAYERS, experts_per_token=1
        ),
        tiny_spec_with(hidden=192, intermediate=64, heads=4, kv_heads=4, head_dim=32, experts=128, layers=TWO_LAYERS),
        tiny_spec_with(layers=("full_attention", "full_attention", "sliding_attention"), kv_heads=1, vocabulary=37),
        tiny_spec_with(swiglu_limit=0.5, swiglu_alpha=1.1, norm_eps=1e-3, tied_embeddings=True, layers=TWO_LAYERS),
    ],
    ids=["odd", "128-experts", "uneven", "limits"],
)
def test_other_shapes_give_the_references_logits(tmp_path: Path, spec: ModelSpec) -> None:
    tokens = [token % spec.vocabulary for token in TOKENS[:40]]
    expected = expected_logits(tmp_path, spec, tokens)
    for together_bytes in (0, 2**25):
        runner = hand(tmp_path / "dense-1", together_bytes=together_bytes)
        assert relative_error(chunked(runner, tokens, 9), expected[[8, 17, 26, 35, 39]]) < TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float64", 1e-5)])
def test_other_precisions_stay_close(tiny: tuple[Path, Tensor], dtype: DtypeName, tolerance: float) -> None:
    folder, expected = tiny
    logits = chunked(hand(written(folder, TINY, "openai"), dtype), TOKENS, 50)
    assert relative_error(logits, expected[[49, 99]]) < tolerance


@pytest.mark.parametrize(
    "rotary",
    [
        TINY.rotary,
        replace(TINY.rotary, truncate=True, theta=10000.0, factor=8.0),
        replace(TINY.rotary, concentration=1.25),
        Rotary(150000.0, 1.0, 4096, 32.0, 1.0, truncate=False, concentration=1.0),
    ],
    ids=["gpt-oss", "truncated", "concentrated", "plain"],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotary_positions_are_the_references_to_the_last(rotary: Rotary, head_dim: int) -> None:
    turned: Any = reference_rotary(rotary, head_dim)
    cosines, sines = turned(torch.zeros(1), torch.arange(131072).unsqueeze(0))
    table = rotary_table(rotary, head_dim, 131072)
    assert torch.equal(table[0], cosines[0])
    assert torch.equal(table[1], sines[0])


def reference_rotary(rotary: Rotary, head_dim: int) -> Any:
    yarn: dict[str, Any] = {
        "rope_type": "yarn" if rotary.factor > 1 else "default",
        "rope_theta": rotary.theta,
        "factor": rotary.factor,
        "beta_fast": rotary.beta_fast,
        "beta_slow": rotary.beta_slow,
        "truncate": rotary.truncate,
        "original_max_position_embeddings": rotary.original_context_tokens,
        "attention_factor": rotary.concentration,
    }
    package = "transformers.models.gpt_oss"
    modeling: Any = import_module(f"{package}.modeling_gpt_oss")  # seconds: only where it is needed
    configuration: Any = import_module(f"{package}.configuration_gpt_oss")
    return modeling.GptOssRotaryEmbedding(configuration.GptOssConfig(head_dim=head_dim, rope_parameters=yarn))


def test_the_last_positions_of_the_context_give_the_references_logits(tmp_path: Path) -> None:
    """One sliding layer: the output depends on a window of tokens alone, so the reference need not see the rest."""
    spec = tiny_spec_with(layers=("sliding_attention",), hidden=32, intermediate=32, heads=2, kv_heads=1, experts=2)
    spec = replace(spec, experts_per_token=1, vocabulary=64)
    model = reference(written(tmp_path, spec, "dense"))
    tokens = [token % 64 for token in TOKENS[:64]]
    expected = reference_logits(model, tokens, 131072 - 64)
    runner = hand(written(tmp_path, spec, "openai"), slots=1, context_tokens=131072, scratch_mib=16)
    runner.open(0)
    for start in range(0, 131072 - 64, 16383):
        length = min(16383, 131072 - 64 - start)
        runner.step(runner.row(0, start, [start % 64] * length, samples=False))
    for place in range(64):
        logits = runner.logits(runner.row(0, 131072 - 64 + place, [tokens[place]]))
        if place >= spec.window:
            assert relative_error(logits, expected[place : place + 1]) < TOLERANCE
