"""Threads of a model: the default, and how they wait for each other."""

import psutil
import pytest

from providers.inference.llama_cpp import threads as model_threads


@pytest.mark.parametrize(
    ("cores", "physical", "threads"), [(8, 4, 4), (8, 8, 7), (2, 1, 1), (2, 2, 1), (1, 1, 1), (4, 32, 3), (4, None, 3)]
)
def test_the_default_is_the_physical_cores_and_leaves_one_to_the_server(
    monkeypatch: pytest.MonkeyPatch, cores: int, physical: int | None, threads: int
) -> None:
    monkeypatch.setattr(model_threads, "usable_cores", lambda: cores)

    def cpu_count(*, logical: bool) -> int | None:
        return None if logical else physical

    monkeypatch.setattr(psutil, "cpu_count", cpu_count)
    assert model_threads.default_threads() == threads


def test_threads_on_all_cores_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_threads, "usable_cores", lambda: 4)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert "OMP_WAIT_POLICY" not in model_threads.thread_environment(3)
    assert model_threads.thread_environment(4)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    assert "OMP_WAIT_POLICY" not in model_threads.thread_environment(4)
