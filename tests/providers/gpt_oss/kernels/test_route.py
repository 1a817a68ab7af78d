"""Sorting pairs by expert: equal to its reference to the bit, and within its numbers."""

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.route import route
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, make_case
from tests.providers.gpt_oss.kernels.compiling import ARCHITECTURES, Budget, Job, check
from tests.support.models.kernel_references import route_reference
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

OUTPUTS = ["order", "starts"]
BUDGET = Budget(registers=104, shared_bytes=16_384, instructions=800)


def same(case: Case) -> None:
    assert_same(case, (route, route_reference), OUTPUTS, poisoned=OUTPUTS)


@pytest.mark.parametrize("spec", [TINY, tiny_spec_with(experts=5, experts_per_token=3)], ids=["tiny", "odd"])
def test_the_kernel_equals_its_reference(spec: ModelSpec) -> None:
    same(make_case(Shape(sequences=((0, 1), (3, 30)), spec=spec)))
    same(make_case(Shape(sequences=((0, 1),), padding=0, spec=spec)))
    same(make_case(Shape(sequences=((3, 200),), padding=0, spec=spec)))


def test_one_expert_may_have_all_and_others_none() -> None:
    case = make_case(Shape(sequences=((3, 40),), padding=3))
    for expert in (0, 7):
        choose(case.step, torch.full((43, 4), expert))
        same(case)


def test_more_pairs_than_are_counted_at_once() -> None:
    same(make_case(Shape(sequences=((0, 1300),), padding=5, spec=tiny_spec_with(hidden=32, intermediate=32, heads=2))))


def test_nothing_but_padding_is_in_no_experts_run() -> None:
    same(make_case(Shape(sequences=(), padding=9)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_within_its_budget(architecture: int) -> None:
    check(Job("route", architecture, rows=2048, singles=False, model="120b"), BUDGET)
