"""Memory and cores within control groups of both versions, and the environment of children that run models."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from providers.common.machine import ControlGroups, UsableMemory, read_memory, usable_cores
from providers.common.processes.child import build_compute_environment, build_environment

GIB = 2**30
OWN_CORES = len(os.sched_getaffinity(0))
V2 = {
    "memory.max": "1000000000",
    "memory.current": "300000000",
    "memory.stat": "anon 1\ninactive_file 100000000\nfile 5",
}
V1 = {
    "memory.limit_in_bytes": "1000000000",
    "memory.usage_in_bytes": "300000000",
    "memory.stat": "inactive_file 7\nhierarchical_memory_limit 5\ntotal_inactive_file 100000000",
}
LIMITED = UsableMemory(800_000_000, 1_000_000_000)


def groups(tmp_path: Path, files: Mapping[str, str], membership: str = "") -> ControlGroups:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "membership").write_text(membership)
    return ControlGroups(tmp_path / "cgroup", tmp_path / "membership")


def within(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "membership"),
    [
        (V2, ""),
        (V2, "0::/"),
        (within("memory", V1), ""),
        (within("memory", V1), "5:memory:/docker/that/is/not/here\n0::/"),
        (within("user.slice/job.scope", V2), "0::/user.slice/job.scope"),
        ({**within("user.slice", V2), "user.slice/job.scope/memory.max": "max"}, "0::/user.slice/job.scope/inner"),
        (within("memory/system/job", V1), "4:memory:/system/job\n1:name=systemd:/"),
        ({**within("a", V2), "a/b/memory.max": str(100 * GIB), "a/b/memory.current": "5"}, "0::/a/b"),
    ],
)
def test_memory_is_that_of_the_narrowest_group(files: Mapping[str, str], membership: str, tmp_path: Path) -> None:
    """The cache of files counts as free in both versions."""
    assert read_memory(groups(tmp_path, files, membership)) == LIMITED


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max", "memory.current": "300000000"},
        {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "300000000"},
        {"memory.max": "odd", "memory.current": ""},
    ],
)
def test_memory_without_a_limit_is_the_machines(files: Mapping[str, str], tmp_path: Path) -> None:
    """Also where the kernel shows the largest number for it."""
    memory = read_memory(groups(tmp_path, files))
    assert memory.total_bytes == psutil.virtual_memory().total
    assert 0 < memory.free_bytes < memory.total_bytes


def test_a_group_that_uses_more_than_its_limit_has_no_memory_free(tmp_path: Path) -> None:
    """The free memory is never below zero."""
    files = {"memory.max": "1000", "memory.current": "5000", "memory.stat": "inactive_file 10"}
    assert read_memory(groups(tmp_path, files)) == UsableMemory(0, 1000)


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu.max": "150000 100000"}, "", 1),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"cpu.max": "max 100000"}, "", OWN_CORES),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "", 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", OWN_CORES),
        ({"job/cpu.max": "100000 100000", "job/inner/cpu.max": "max 100000"}, "0::/job/inner", 1),
        ({"cpu/job/cpu.cfs_quota_us": "100000", "cpu/job/cpu.cfs_period_us": "100000"}, "2:cpu,cpuacct:/job", 1),
        ({"cpu.max": "99900000 100000"}, "", OWN_CORES),
        ({}, "", OWN_CORES),
    ],
)
def test_cores_are_those_within_the_quota(
    files: Mapping[str, str], membership: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group around the process counts, and OpenMP's own limits do."""
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    assert usable_cores(groups(tmp_path, files, membership)) == cores
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    assert usable_cores(groups(tmp_path, files, membership)) == 1


def test_a_child_that_runs_a_model_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment has only variables that it computes with."""
    secrets = (
        "OPENAI_API_KEY",
        "DATABASE_URL",
        "HF_TOKEN",
        "NVIDIA_API_KEY",
        "LLAMA_API_KEY",
        "XDG_SECRET",
        "PGPASSWORD",
    )
    needed = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false", "HOME": "/home/a"}
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    for name, value in needed.items():
        monkeypatch.setenv(name, value)
    environment = build_compute_environment()
    assert environment.items() >= needed.items()
    assert environment["PATH"] == os.environ["PATH"]
    assert "secret" not in environment.values()
    assert "secret" not in build_environment().values()
    assert build_environment(["HF_TOKEN"], ["HF_"])["HF_TOKEN"] == "secret"
