"""Promises of the references beyond the torch model's forward pass: padding, ties, rows without a choice, other orders
of work."""

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers, tensor_to_list
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, copied, make_case
from tests.support.models.kernel_references import (
    embed_reference,
    experts_down_reference,
    experts_up_reference,
    grouped_down_reference,
    grouped_up_reference,
    project_out_reference,
    qkv_reference,
    route_reference,
    sample_reference,
    tensors_by_name,
)


def all_to(case: Case, expert: int) -> None:
    chosen = torch.arange(case.layer.spec.experts_per_token).repeat(len(case.step.chosen_experts), 1)
    chosen[:, 0] = expert
    chosen[:, 1:] += expert + 1
    choose(case.step, chosen % case.layer.spec.experts)


def test_grouped_work_is_the_same_work() -> None:
    for expert in (None, 0, 7):
        case = make_case(Shape(sequences=((0, 1), (3, 30))))
        if expert is not None:
            all_to(case, expert)
        assert_same(case, (grouped_up_reference, experts_up_reference), ["inner"], tolerance=1e-6)
        assert_same(case, (grouped_down_reference, experts_down_reference), ["hidden"], tolerance=1e-6)


def test_routing_is_a_stable_sort() -> None:
    case = make_case()
    before = copied(case.step)
    route_reference(case.layer, case.step)
    assert torch.equal(before.order, case.step.order)
    assert torch.equal(before.starts, case.step.starts)
    pairs = tensor_to_list(case.step.chosen_experts.flatten())
    expected = sorted((pair for pair, expert in enumerate(pairs) if expert >= 0), key=pairs.__getitem__)
    assert tensor_to_list(case.step.order[: len(expected)]) == expected
    assert int(case.step.starts[-1]) == len(expected)


def test_padding_chooses_no_expert_and_writes_no_page() -> None:
    case = make_case(Shape(padding=3))
    project_out_reference(case.layer, case.step)
    padding = case.step.positions < 0
    assert bool((case.step.chosen_experts[padding] == -1).all())
    assert bool((case.step.chosen_experts[~padding] >= 0).all())
    before = copied(case.step)
    qkv_reference(case.layer, case.step)
    live = int((~padding).sum())
    for name in ("keys", "values"):
        new, old = tensors_by_name(case.step.tables)[name], tensors_by_name(before.tables)[name]
        changed = (new != old) & ~(new.isnan() & old.isnan())
        assert not changed[0].any(), "the layer's index was forgotten"
        assert int(changed[1].any(dim=-1).any(dim=1).sum()) == live


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    case = make_case()
    case.layer.router_weight.zero_()
    case.layer.router_bias.copy_(torch.tensor([0.0, 1, 1, 0, 1, 2, 1, 1]))
    project_out_reference(case.layer, case.step)
    live = case.step.positions >= 0
    assert bool((case.step.chosen_experts[live] == torch.tensor([5, 1, 2, 4])).all())


def test_sampled_tokens_are_left_for_the_next_step() -> None:
    case = make_case()
    case.step.hidden[0] = torch.nan
    sample_reference(case.ends, case.step)
    live = case.step.sample_rows >= 0
    rows = case.step.sample_rows[live].long()
    assert rows[0] == 0
    assert int(case.step.sampled_tokens[0]) == -1
    assert bool((case.step.sampled_tokens[live][1:] >= 0).all())
    assert bool((case.step.sampled_tokens[~live] == -1).all())
    last = case.step.tables.last_tokens[case.step.slots[rows].long()]
    assert torch.equal(last, case.step.sampled_tokens[live].clamp(min=0)), "never a token that there is not"


def test_greedy_rows_take_the_best_logit_and_warm_ones_their_own_draw() -> None:
    case = make_case(Shape(padding=0))
    case.step.tables.temperatures.zero_()
    sample_reference(case.ends, case.step)
    greedy = case.step.sampled_tokens.clone()
    case.step.tables.temperatures.fill_(1e6)
    sample_reference(case.ends, case.step)
    warm = case.step.sampled_tokens.clone()
    case.step.tables.seeds.add_(1)
    sample_reference(case.ends, case.step)
    assert not torch.equal(warm, greedy)
    assert not torch.equal(warm, case.step.sampled_tokens)


def test_a_token_that_the_host_did_not_know_is_the_slots_last() -> None:
    case = make_case()
    step = case.step
    embed_reference(case.ends, step)
    for row in range(len(step.positions)):
        if int(step.positions[row]) >= 0:
            token = int(step.tokens[row])
            token = int(step.tables.last_tokens[int(step.slots[row])]) if token < 0 else token
            assert torch.equal(step.hidden[row], case.ends.embedding[token])


def test_the_comparison_sees_what_is_wrong() -> None:
    """A row that was forgotten, a tensor that was not to change, a wrong number, and nothing at all."""
    case = make_case(Shape(sequences=((0, 1), (3, 5))))

    def forgetful(layer: Layer, step: StepBuffers) -> None:
        experts_up_reference(layer, step)
        step.inner[0, 1] = torch.nan

    def careless(layer: Layer, step: StepBuffers) -> None:
        experts_up_reference(layer, step)
        step.arrivals[0] += 1

    def inexact(layer: Layer, step: StepBuffers) -> None:
        experts_up_reference(layer, step)
        step.inner.mul_(1.0001)

    def idle(layer: Layer, step: StepBuffers) -> None:
        pass

    for wrong, message in (
        (forgetful, "inner"),
        (careless, "arrivals"),
        (inexact, "inner is off by 1"),
        (idle, "inner"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_same(case, (wrong, experts_up_reference), ["inner"], poisoned=["inner"])
    assert_same(case, (experts_up_reference, experts_up_reference), ["inner"], poisoned=["inner"])
