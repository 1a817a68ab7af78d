"""The embedding kernel: equal to its reference to the bit, and within its numbers."""

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.embed import embed
from tests.providers.gpt_oss.kernels.comparing import Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import ARCHITECTURES, Budget, Job, check
from tests.support.models.kernel_references import embed_reference

BUDGET = Budget(registers=40, shared_bytes=0, instructions=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_its_reference(dtype: torch.dtype) -> None:
    case = make_case(Shape(sequences=((0, 1), (15, 1), (16, 1), (3, 7)), dtype=dtype))
    assert_same(case, (embed, embed_reference), ["hidden"], poisoned=["hidden"], tolerance=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_within_its_budget(architecture: int) -> None:
    check(Job("embed", architecture), BUDGET)
