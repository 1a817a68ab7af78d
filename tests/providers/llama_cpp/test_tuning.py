"""Threads and batches: chosen from measurements, stored, and bounded by what the machine allows."""

import asyncio
import importlib.util
import json
import time
from pathlib import Path

import pytest

from providers.inference.llama_cpp.engine import DEFAULT_BATCH_TOKENS, LlamaCppSettings
from providers.inference.llama_cpp.models import machine
from providers.inference.llama_cpp.models.packages import PACKAGED_MODELS, models_dir
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.llama_cpp.tuning import tuning
from providers.inference.llama_cpp.tuning.sample_file import write_sample
from providers.inference.llama_cpp.tuning.tuning import Speed, Tuning, choose_tuning, threads_to_try, tune_settings
from tests.providers.llama_cpp.asking import ask, finish_of, small_config
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf

UNTUNED = Tuning(3, 3, DEFAULT_BATCH_TOKENS)


def settings(path: Path, threads: int | None = None) -> LlamaCppSettings:
    return LlamaCppSettings("tiny", str(path), 512, 1, threads, {})


def test_the_default_is_tried_first_and_no_number_twice() -> None:
    assert threads_to_try(8, 4) == [7, 8, 4, 3]
    assert threads_to_try(2, 2) == [1, 2]
    assert threads_to_try(1, 1) == [1]
    assert threads_to_try(4, 32) == [3, 4, 2]


def test_fewer_threads_win_when_they_are_hardly_slower() -> None:
    speeds = [Speed(7, 512, 40, 300), Speed(8, 512, 30, 400), Speed(4, 512, 39, 200)]
    assert choose_tuning(speeds, UNTUNED) == Tuning(4, 8, 512, tuple(speeds))


def test_a_batch_size_must_be_clearly_faster() -> None:
    speeds = [Speed(1, 512, 10, 100), Speed(1, 256, 10, 104), Speed(1, 1024, 10, 90)]
    assert choose_tuning(speeds, UNTUNED).batch_tokens == 512
    speeds.append(Speed(1, 1024, 10, 120))
    assert choose_tuning(speeds, UNTUNED).batch_tokens == 1024


def test_without_a_measurement_the_default_stays() -> None:
    assert choose_tuning([], UNTUNED) == UNTUNED


def test_threads_on_all_cores_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert "OMP_WAIT_POLICY" not in machine.thread_environment(3)
    assert machine.thread_environment(4)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    assert "OMP_WAIT_POLICY" not in machine.thread_environment(4)


def test_a_stored_result_is_used_and_an_impossible_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself is the machine's, which is busy with tests: here it ends at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "usable_cores", lambda: 4)
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 0)
    monkeypatch.setattr(tuning, "_BUSY_PERCENT", 101.0)
    monkeypatch.setattr(tuning, "_BUDGET_S", 0.0)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"none")
    assert asyncio.run(tune_settings(settings(model, threads=2))).threads == 2
    measured = asyncio.run(tune_settings(settings(model)))
    assert (measured.threads, measured.batch_threads, measured.batch_tokens) == (3, 3, 512)
    (stored,) = (models_dir() / "tuning").glob("*.json")
    stored.write_text(json.dumps({"threads": 2, "batch_threads": 4, "batch_tokens": 256, "speeds": []}))
    chosen = asyncio.run(tune_settings(settings(model)))
    assert (chosen.threads, chosen.batch_threads, chosen.batch_tokens) == (2, 4, 256)
    for impossible in ({"threads": 64}, {"batch_tokens": 7}, {"batch_threads": 0}, {"threads": "2"}):
        stored.write_text(json.dumps({"threads": 2, "batch_threads": 4, "batch_tokens": 256, **impossible}))
        assert asyncio.run(tune_settings(settings(model))).threads == 3
    model.write_bytes(b"another")
    asyncio.run(tune_settings(settings(model)))
    assert len([*(models_dir() / "tuning").glob("*.json")]) == 2


def test_a_busy_machine_is_measured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "usable_cores", lambda: 4)
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 0)
    monkeypatch.setattr(tuning, "_BUSY_PERCENT", -1.0)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"none")
    assert asyncio.run(tune_settings(settings(model))).threads == 3
    assert not [*(models_dir() / "tuning").glob("*.json")]


async def test_the_stand_in_has_the_models_first_layers_and_takes_no_room(
    model_is_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp loads it, and answers something."""
    monkeypatch.setattr("providers.inference.llama_cpp.tuning.sample_file.MAX_LAYER_BYTES", 2**23)
    model, sample = models_dir() / PACKAGED_MODELS["smollm2-135m-instruct"].filename, tmp_path / "sample.gguf"
    layers = await asyncio.to_thread(write_sample, model, sample)
    stat = await asyncio.to_thread(sample.stat)
    assert 1 < layers < 30
    assert stat.st_blocks * 512 < 0.4 * stat.st_size
    inference = LlamaCpp(small_config(model_path=str(sample), model="smollm2-135m-instruct", parallel=1))
    try:
        await inference.start()
        assert finish_of(await ask(inference, max_completion_tokens=4)).usage.output_tokens
    finally:
        await inference.close()


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the engine")
def test_a_model_is_measured_in_time_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gpt_oss_gguf()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "usable_cores", lambda: 2)
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 0)
    monkeypatch.setattr(tuning, "_BUSY_PERCENT", 101.0)
    monkeypatch.setattr(tuning, "_BUDGET_S", 60.0)
    measured = asyncio.run(tune_settings(settings(path)))
    (stored,) = (models_dir() / "tuning").glob("*.json")
    assert json.loads(stored.read_text())["speeds"][0]["decode"] > 0
    began = time.monotonic()
    assert asyncio.run(tune_settings(settings(path))) == measured
    assert time.monotonic() - began < 5
