"""Runners that give several tokens a step: the engine takes as many as have their place, and asks for no other."""

from collections.abc import Mapping

import pytest

from providers.inference.gpt_oss.engine.runner import Plan, SampledRun
from providers.inference.gpt_oss.engine.sampling import SampledToken
from tests.providers.gpt_oss.driving import STOP, alone, echo
from tests.providers.gpt_oss.engines import ask, gather, ids_of, running
from tests.support.models.scripted_runner import ScriptedRunner


class Foreseeing(ScriptedRunner):
    """Gives the script's next tokens, too, and is given them in the next row."""

    tokens = 0

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        tokens_by_slot: dict[int, SampledToken] = {}
        for slot, first in super().step(plan, masks).items():
            tokens = [*self._open_sequences[slot].tokens, first.token]
            for _ in range(3):
                tokens.append(self._script(tokens))
            tokens_by_slot[slot] = SampledRun(
                first.token, following_tokens=[SampledToken(token) for token in tokens[-3:]]
            )
        self.tokens += plan.token_count
        return tokens_by_slot


@pytest.mark.parametrize("most", [1, 2, 4, 7, 30, None])
@pytest.mark.parametrize("prompt", [[1, 2], [0, 0, 1], [2, 2, 1, 0]])
async def test_a_run_ends_where_its_sequence_does(most: int | None, prompt: list[int]) -> None:
    runner = Foreseeing(echo)
    request = ask(prompt, most)
    async with running(runner) as engine:
        steps = await gather(engine, request)
        metrics = engine.metrics()
    ids = ids_of(steps)
    assert ids == alone(echo, request, runner.context_tokens)
    assert steps[-1].finish_reason == ("stop" if ids[-1] == STOP else "length")
    assert metrics.generated_tokens == len(ids)
    assert metrics.steps <= -(-len(ids) // 4)
    assert metrics.pages_free == metrics.pages
