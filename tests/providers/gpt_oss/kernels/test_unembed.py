"""The unembedding kernel: its reference's logits, of the rows that are sampled alone, and within its numbers."""

import re

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.unembed import unembed
from tests.providers.gpt_oss.kernels.comparing import ENDS_SHAPES, Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check
from tests.support.models.kernel_references import unembed_reference

BUDGETS = {
    80: Budget(registers=128, shared_bytes=49_152, instructions=480),
    90: Budget(registers=72, shared_bytes=73_728, instructions=460),
    100: Budget(registers=72, shared_bytes=73_760, instructions=540),
}
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTC"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ENDS_SHAPES)
def test_the_kernel_equals_its_reference(shape: str, dtype: torch.dtype) -> None:
    ends_shape = ENDS_SHAPES[shape]
    case = make_case(Shape(ends_shape.sequences, ends_shape.padding, spec=ends_shape.spec, dtype=dtype))
    assert_same(case, (unembed, unembed_reference), ["logits"], poisoned=["logits"])


def test_a_row_that_is_no_number_is_alone_in_it() -> None:
    case = make_case()
    case.step.hidden[1] = torch.nan
    assert_same(case, (unembed, unembed_reference), ["logits"], poisoned=["logits"])


@pytest.mark.parametrize(("architecture", "rows"), [(80, 128), (90, 1), (90, 128), (100, 128)])
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    product = check(Job("unembed", architecture, rows=rows), BUDGETS[architecture])[-1]
    assert any(opcode.startswith(PRODUCTS[architecture]) for opcode in product.opcodes)
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x\w+)", product.ptx)) == {"0x10"}, "16 bytes each"
