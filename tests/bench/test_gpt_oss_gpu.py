"""The benchmark of the kernels runs, so that it does when there is a card: on a CPU, tiny, every part of it."""

import json
from pathlib import Path

import pytest

from tests.bench.gpt_oss_gpu import PARTS, main
from tests.bench.gpu_model import SPECS, Touched


@pytest.mark.timeout(300)
def test_all_of_it_runs_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry", "--out", str(tmp_path), "--routing", "zipf", "--parts", *PARTS])
    found = json.loads((tmp_path / "gpt_oss.json").read_text())
    assert {row["kernel"] for row in found["kernels"]} >= {"qkv", "attend_decode", "experts_up", "sample"}
    assert [(row["rows"], row["context"]) for row in found["steps"]] == [(2, 40)]
    assert all(row["share"] > 0 and 1 <= row["experts"] <= 8 for row in found["steps"])
    assert [row["tokens"] for row in found["prompts"]] == [64]
    assert [row["cached"] for row in found["server"]] == [False, True] * 2
    assert all(row["tokens/s"] > 0 for row in found["server"])
    assert [(row["relative_error"], row["same_best"]) for row in found["agreement"]] == [(0, 1)] * 4
    ran = {row["rival"]: row for row in found["rivals"]}
    assert "ms" in ran["transformers"], ran["transformers"]
    assert (tmp_path / "gpt_oss.svg").read_text().startswith("<svg")
    assert "## steps" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "rows", "experts", "gigabytes"), [("20b", 1, 4, 3.71), ("120b", 32, 81.66, 41.7)])
def test_the_bytes_of_a_step_are_the_models(model: str, rows: int, experts: float, gigabytes: float) -> None:
    touched = Touched(SPECS[model], rows, 0, experts)
    assert touched.step_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert touched.cached_bytes == 0
    cached = 2 * (1024 + 128) * 2048 * len(SPECS[model].layers) / 2
    assert Touched(SPECS[model], 2, 1024, 4).cached_bytes == cached
