"""Which machines may run which models, and the refusal of the others."""

from dataclasses import replace

import pytest
import torch

from providers.inference.gpt_oss.sizing.fit import Machine, Precision, assess_fit, token_read_bytes, weight_bytes
from providers.inference.gpt_oss.torch_backend.machine import free_bytes, measure_device
from tests.support.models.random_checkpoints import TINY

GPT_OSS_20B = replace(
    TINY,
    layers=("sliding_attention", "full_attention") * 12,
    hidden=2880,
    intermediate=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=32,
    vocabulary=201088,
    window=128,
)
BF16_PACKED = Precision(2, experts_packed=True)
LAPTOP = Machine("cpu", 24 * 2**30, 33e9, 0.5e9)
H200 = Machine("cuda:0", 139 * 2**30, 4e12, 1e12)


def test_the_bytes_of_the_20b_are_those_of_its_checkpoint() -> None:
    assert weight_bytes(GPT_OSS_20B, BF16_PACKED) == pytest.approx(13.76e9, rel=2e-3)
    assert token_read_bytes(GPT_OSS_20B, BF16_PACKED) == pytest.approx(3.71e9, rel=2e-3)


def test_a_gpu_may() -> None:
    report = assess_fit(GPT_OSS_20B, BF16_PACKED, H200)
    assert report.refusal is None
    assert report.tokens_per_s > 100


def test_the_refusal_of_a_laptop_that_is_too_slow_names_the_remedy() -> None:
    report = assess_fit(GPT_OSS_20B, BF16_PACKED, LAPTOP)
    assert 0.1 < report.tokens_per_s < 0.3
    assert report.refusal is not None
    assert [word for word in ("tokens/s", "llama_cpp", "vllm", "run_anyway") if word not in report.refusal] == []
    assert assess_fit(GPT_OSS_20B, BF16_PACKED, LAPTOP, 0.1).refusal is None


def test_the_refusal_of_a_machine_that_is_too_small_says_by_how_much() -> None:
    small = replace(H200, memory_bytes=8 * 2**30)
    refusal = assess_fit(GPT_OSS_20B, BF16_PACKED, small).refusal
    assert refusal is not None
    assert "13.0 GiB" in refusal
    assert "cuda:0 has 8.0 GiB free" in refusal
    unpacked = assess_fit(GPT_OSS_20B, Precision(2, experts_packed=False), replace(H200, memory_bytes=38 * 2**30))
    assert unpacked.needed_bytes > 41e9
    assert unpacked.refusal is not None


def test_a_laptop_may_run_a_small_model() -> None:
    assert assess_fit(TINY, BF16_PACKED, LAPTOP).refusal is None


def test_this_machine_is_measured() -> None:
    machine = measure_device(torch.device("cpu"), torch.float32)
    assert machine.memory_bytes == pytest.approx(free_bytes(torch.device("cpu")), rel=0.5)
    assert machine.read_bytes_per_s > 1e6
    assert machine.unpack_weights_per_s > 1e6
