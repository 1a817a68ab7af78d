"""The benchmark of the kernels runs, so that it does when there is a card: on a CPU, tiny, every part of it. A
part that fails is reported and costs no other part; and its limits are the model's arithmetic."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer
from tests.bench.gpt_oss_gpu import NEEDS_S, PARTS, SECONDS, main
from tests.bench.gpu_agreement import agreement
from tests.bench.gpu_measures import Ceilings, kernel_table, make_stage
from tests.bench.gpu_model import SPECS, Touched, make_weights
from tests.bench.gpu_parts import Parts
from tests.bench.gpu_rivals import RIVALS
from tests.support.models.kernel_references import REFERENCE

CPU = torch.device("cpu")
SMALL = replace(SPECS["tiny"], vocabulary=300)

# Of the model's shapes, by hand: 64 query and 16 key and value heads of 64 numbers, 2,880 wide.
ATTENTION = 5120 * 2880 + 5120 + 2880 * 4096 + 2880 + 64 + 2 * 2880
EXPERT_BYTES = 3 * 2880 * 2880 * 17 // 32 + 2 * (5760 + 2880)
EMBEDDING = 201_088 * 2880
MODELS = {"20b": (24, 32), "120b": (36, 128)}
# Rows, experts of a layer, and tokens a second with 1,024 and 8,192 cached ones, at 4.3 TB/s.
LIMITS = [
    ("20b", 1, 4.00, 1151, 1099),
    ("20b", 8, 21.00, 3684, 3201),
    ("20b", 32, 31.55, 10_294, 7240),
    ("20b", 128, 32.00, 33_919, 14_195),
    ("120b", 1, 4.00, 852, 810),
    ("120b", 32, 81.66, 3173, 2655),
    ("120b", 128, 125.80, 8038, 5380),
]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_of_it_runs_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for the comparison, which has a test of its own."""
    parts = ["kernels", "steps", "prompts", "server", "soak", "rivals"]
    main(["--dry", "--out", str(tmp_path), "--routing", "zipf", "--parts", *parts])
    report = json.loads((tmp_path / "gpt_oss_tiny.json").read_text())
    assert {row["kernel"] for row in report["kernels"]} >= {"qkv", "attend_decode", "experts_up", "sample"}
    assert {row["kernel"] for row in report["kernels"] if row["prompt"]} >= {"attend_prefill", "grouped_up"}
    assert not any("failed" in row for row in report["kernels"])
    assert [(row["rows"], row["context"]) for row in report["steps"]] == [(2, 40)]
    assert all(row["share"] > 0 and 1 <= row["experts"] <= 8 for row in report["steps"])
    assert [row["tokens"] for row in report["prompts"]] == [64]
    assert [row["cached"] for row in report["server"]] == [False, True] * 2
    assert all(row["tokens/s"] > 0 for row in report["server"])
    assert report["soak"]["answered"] > 0
    assert "ms" in report["rival transformers"][0], report["rival transformers"]
    assert all("needs a GPU" in report[f"rival {name}"]["skipped"] for name in RIVALS if name != "transformers")
    assert report["seconds"].keys() == report["clocks"].keys() - {"before"}
    assert (tmp_path / "gpt_oss_tiny.svg").read_text().startswith("<svg")
    assert "## steps" in capsys.readouterr().out


def test_every_kernel_is_held_against_its_reference_alone() -> None:
    """A wrong one is found, one that fails too, and the others are tried all the same."""

    def wrong(layer: Layer, step: StepBuffers) -> None:
        REFERENCE.qkv(layer, step)
        step.tables.values[layer.index] *= 1.01

    def failing(layer: Layer, step: StepBuffers) -> None:
        raise RuntimeError("out of shared memory")

    weights = make_weights(SMALL, CPU, torch.float32, "uniform")
    with torch.inference_mode():
        table = agreement(weights, replace(REFERENCE, qkv=wrong, grouped_up=failing), [1, 5], [20])
    bad = {(row["step"], row["kernel"]) for row in table if not row["ok"]}
    named = {each: kernel for each, kernel in bad if kernel not in ("all", "qkv")}
    assert {each for each, kernel in bad if kernel == "qkv"} == {"1 rows", "5 rows", "a prompt of 20"}
    assert named == {"5 rows": "grouped_up", "a prompt of 20": "grouped_up"}
    assert len(table) == 3 * 9


def _fill_with_ones(memory: torch.Tensor) -> torch.Tensor:
    return memory.fill_(1)


def test_a_number_may_be_written_where_it_was_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 about one in a thousand is, and a kernel that rounds otherwise writes another one there."""

    def rounding(layer: Layer, step: StepBuffers) -> None:
        REFERENCE.qkv(layer, step)
        pages = step.tables.pages[step.slots.long(), step.positions // PAGE_TOKENS].long()
        step.tables.values[layer.index][pages, :, step.positions % PAGE_TOKENS, ::8] *= 1 + 2**-7

    weights = make_weights(SMALL, CPU, torch.bfloat16, "uniform")
    for layer in weights.layers:
        layer.qkv_weight.zero_()
        layer.qkv_bias.fill_(1)
    monkeypatch.setattr(torch.Tensor, "normal_", _fill_with_ones)
    with torch.inference_mode():
        table = agreement(weights, replace(REFERENCE, qkv=rounding), [3], [])
    (written_row,) = [row for row in table if row["kernel"] == "qkv"]
    assert written_row["ok"], written_row
    assert written_row["error"] > 1e-3


def test_a_kernel_that_fails_costs_its_own_figures_alone() -> None:
    weights = make_weights(SMALL, CPU, torch.float32, "uniform")
    launched = 0

    def failing(layer: Layer, step: StepBuffers) -> None:
        """Not in the step that counts experts."""
        nonlocal launched
        launched += 1
        if launched > len(weights.layers):
            raise RuntimeError("misaligned address")
        REFERENCE.project_out(layer, step)

    with torch.inference_mode():
        stage = make_stage(weights, replace(REFERENCE, project_out=failing), Ceilings(1e9, 1e9, 1e9), 4, 100)
        table = kernel_table(stage, [4], [])
    assert [row["kernel"] for row in table if "failed" in row] == ["project_out"]
    assert len(table) == 8


def test_a_part_that_fails_or_has_no_time_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    results: dict[str, Any] = {"model": "tiny", "device": "CPU", "versions": {}}
    parts = Parts(results, tmp_path, seconds=60)
    assert not parts.run("first", fail)
    written = json.loads((tmp_path / "gpt_oss_tiny.json").read_text())
    assert "illegal memory access" in written["first"]["failed"]
    assert "in fail" in written["first"]["where"]
    assert not parts.run("second", fail, needs_s=61)
    assert parts.run("third", lambda: [{"ms": 1.0}], needs_s=10)
    written = json.loads((tmp_path / "gpt_oss_tiny.json").read_text())
    assert "it needs 61 s" in written["second"]["skipped"]
    assert written["third"] == [{"ms": 1.0}]
    assert "## third" in (tmp_path / "gpt_oss_tiny.md").read_text()


@pytest.mark.long  # a process that imports torch
def test_what_needs_a_server_is_not_imported_before_the_server_is_measured() -> None:
    """A machine with a card may have no more than torch, pydantic and the SDK."""
    report = (
        "import sys, tests.bench.gpt_oss_gpu as bench;"
        "print([name for name in ('fastapi', 'uvicorn', 'psutil', 'openai_harmony', 'llguidance',"
        " 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", report], capture_output=True, check=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]"


def test_its_parts_fit_into_ten_minutes() -> None:
    for model, needs in NEEDS_S.items():
        assert needs.keys() == {*PARTS, "runner"}
        assert 30 + sum(needs.values()) <= SECONDS, model


@pytest.mark.parametrize(("model", "rows", "experts", "at_1k", "at_8k"), LIMITS)
def test_limits_are_the_bytes_of_the_model(model: str, rows: int, experts: float, at_1k: int, at_8k: int) -> None:
    layers, all_experts = MODELS[model]
    dense = 2 * (layers * (ATTENTION + all_experts * 2881) + EMBEDDING + 2880)
    for context, expected in ((1024, at_1k), (8192, at_8k)):
        touched = Touched(SPECS[model], rows, context, experts)
        cached = rows * 2048 * layers // 2 * (context + 128)
        assert touched.cached_bytes == cached
        assert touched.step_bytes == pytest.approx(dense + layers * experts * EXPERT_BYTES + cached, rel=1e-12)
        # That table was rounded: experts to hundredths.
        assert rows / touched.limit_s(4.3e12, 790e12) == pytest.approx(expected, rel=2e-3)
    by_kernel = Touched(SPECS[model], rows, 1024, experts).kernel_bytes()
    each = ("qkv", "attend_decode", "project_out", "grouped_up", "grouped_down")
    whole = layers * sum(by_kernel[name] for name in each) + by_kernel["sample"]
    assert whole == pytest.approx(Touched(SPECS[model], rows, 1024, experts).step_bytes, rel=1e-3)


@pytest.mark.parametrize(("model", "tokens", "ms"), [("20b", 2048, 16.3), ("20b", 8192, 71.4), ("120b", 8192, 107)])
def test_limits_of_prompts_count_attention_too(model: str, tokens: int, ms: float) -> None:
    touched = Touched(SPECS[model], tokens, 0, MODELS[model][1], prompt=True)
    assert 1e3 * touched.limit_s(4.3e12, 790e12) == pytest.approx(ms, rel=0.01)
    short = Touched(SPECS[model], 100, 0, 4, prompt=True)
    assert short.attention_operations == 4 * 4096 * MODELS[model][0] * 5050


def test_bytes_are_those_that_were_published() -> None:
    for model, (layers, experts) in MODELS.items():
        assert ATTENTION == 26_555_904
        assert EXPERT_BYTES == 13_236_480
        assert SPECS[model].dense_parameters == layers * (ATTENTION + experts * 2881) + EMBEDDING + 2880
        parameters = SPECS[model].dense_parameters + EMBEDDING + layers * experts * (3 * 2880 * 2880 + 8640)
        assert parameters / 1e9 == pytest.approx({"20b": 20.915, "120b": 116.829}[model], abs=1e-3)
        assert 2e-9 * SPECS[model].dense_parameters == pytest.approx({"20b": 2.437, "120b": 3.097}[model], abs=1e-3)


@pytest.mark.parametrize(("rows", "saved"), [(1, 201_088 * (2880 - 12)), (8, 201_088 * (2880 - 12)), (9, 0)])
def test_a_certified_step_is_held_against_its_own_bytes(rows: int, saved: int) -> None:
    plain, certified = (Touched(SPECS["20b"], rows, 1024, 4, certified=each) for each in (False, True))
    assert plain.step_bytes - certified.step_bytes == pytest.approx(saved)
    assert certified.kernel_bytes()["sample"] == 2 * EMBEDDING - saved
