"""The probe reports a missing driver or compiler before anything is loaded."""

import subprocess
import sys

import torch

from providers.inference.gpt_oss.triton_backend.probe import probe_triton

ASK = (
    "import torch; from providers.inference.gpt_oss.triton_backend.probe import probe_triton; "
    "print(probe_triton(torch.device('cpu')))"
)


def test_where_a_kernel_runs_nothing_is_missing() -> None:
    assert probe_triton(torch.device("cpu")) is None


def test_a_missing_driver_is_reported() -> None:
    """Not interpreted, and no card."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ASK]
    ended = subprocess.run(command, capture_output=True, check=True, env=environment, text=True, timeout=60)
    assert ended.stdout.startswith("Triton cannot run a kernel: "), ended.stderr
    assert "driver" in ended.stdout
