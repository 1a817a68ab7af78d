"""A runner compiles all kernels before it serves, for every step that can come."""

import pytest

from tests.providers.gpt_oss.kernels.compiling import left_to_compile


@pytest.mark.parametrize(("model", "slots", "step_tokens"), [("20b", 32, 2048), ("120b", 128, 8192), ("20b", 1, 64)])
def test_nothing_is_compiled_while_requests_wait(model: str, slots: int, step_tokens: int) -> None:
    before, later = left_to_compile(90, model, slots, step_tokens)
    assert later == []
    # A kernel takes a second or two, once on a machine.
    assert before <= 110
