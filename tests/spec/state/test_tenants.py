"""Tenants: three of them act in any order. None receives a byte of another's data, and another's id is answered like an
id that does not exist.

STACK_TENANT_STEPS says how many steps are taken (1,000 by default). The last of them are printed.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.support.tenants.operations import OPERATIONS, PAIRS, SAID, Operation, ask
from tests.support.tenants.world import SECRETS, SHARED_ITEM, TENANTS, World, three_tenants

STEPS: Final = int(os.environ.get("STACK_TENANT_STEPS", "200"))
_STEPS_EACH: Final = 50
pytestmark = pytest.mark.timeout(120 + STEPS)

tenants = st.sampled_from(TENANTS)
operations = st.sampled_from(OPERATIONS)
on_responses = st.sampled_from([each for each in OPERATIONS if each.kind == "response"])
numbers = st.integers(0, 10**6)


@contextmanager
def world_of_tenants(folder: Path) -> Generator[tuple[World, asyncio.Runner]]:
    """The stack lives as long as the context, and runs while a step waits for it."""
    with asyncio.Runner() as runner:
        opening = three_tenants(folder, code=shutil.which("bwrap") is not None)
        world = runner.run(opening.__aenter__())
        try:
            yield world, runner
        finally:
            runner.run(opening.__aexit__(None, None, None))


class Tenants(RuleBasedStateMachine):
    """Steps of three tenants on one stack. The objects of earlier runs stay: the more there are, the better."""

    world: World
    runner: asyncio.Runner

    @rule(tenant=tenants, fields=st.sampled_from(SAID), number=numbers)
    def say(self, tenant: str, fields: dict[str, Any], number: int) -> None:
        self._ask(tenant, "POST", "/responses", ask(f"{SECRETS[tenant]} {number}", **fields))

    @rule(tenant=tenants, number=numbers)
    def say_with_ids_of_its_own(self, tenant: str, number: int) -> None:
        word = SECRETS[tenant]
        items = [{"role": "user", "content": word, "id": f"msg_{word}{number}"}]
        items += [{"role": "user", "content": word, "id": SHARED_ITEM}]
        self._ask(tenant, "POST", "/responses", ask(word, input=items))
        self.world.know(tenant, "item", f"msg_{word}{number}")

    @rule(tenant=tenants)
    def refer_to_an_id_that_all_use(self, tenant: str) -> None:
        input_items = [{"type": "item_reference", "id": SHARED_ITEM}]
        self._ask(tenant, "POST", "/responses", ask("", input=input_items))

    @rule(tenant=tenants, key=st.sampled_from("xyz"), fields=st.sampled_from(SAID))
    def send_a_key_that_all_use(self, tenant: str, key: str, fields: dict[str, Any]) -> None:
        self._ask(tenant, "POST", "/responses", ask("the same words", **fields), key=key)
        self._ask(tenant, "POST", "/conversations", {"metadata": {"a": str(fields)}}, key=key)

    @rule(tenant=tenants, path=st.sampled_from(["/files", "/vector_stores", "/containers", "/models"]))
    def list_all(self, tenant: str, path: str) -> None:
        self._ask(tenant, "GET", path)

    @rule(tenant=tenants)
    def chat(self, tenant: str) -> None:
        body = {"model": "scripted", "messages": [{"role": "user", "content": SECRETS[tenant]}]}
        self._ask(tenant, "POST", "/chat/completions", body)

    @rule(tenant=tenants, number=numbers)
    def make_new_things(self, tenant: str, number: int) -> None:
        word = f"{SECRETS[tenant]} {number}"
        self._ask(tenant, "POST", "/conversations", {"items": [{"role": "user", "content": word}]})
        self._ask(tenant, "POST", "/files", {"purpose": "assistants", "file": word}, form=True)
        self._ask(tenant, "POST", "/vector_stores", {"name": word})

    @rule(tenant=tenants, operation=operations, number=numbers)
    def use_what_is_its_own(self, tenant: str, operation: Operation, number: int) -> None:
        own_ids = self.world.of(tenant, operation.kind)
        if own_ids:
            ids = own_ids[number % len(own_ids)]
            self.runner.run(self.world.run(tenant, operation, ids, f"{SECRETS[tenant]} {number}"))

    @rule(tenant=tenants, operations=st.lists(operations, min_size=1, max_size=5), number=numbers, mixed=st.booleans())
    def use_what_is_anothers(self, tenant: str, operations: list[Operation], number: int, mixed: bool) -> None:
        other = TENANTS[(TENANTS.index(tenant) + 1 + number % 2) % 3]
        for operation in operations:
            mixing = mixed and operation.kind in PAIRS
            all_ids = (
                self.world.pairs(tenant, operation.kind, other) if mixing else self.world.of(other, operation.kind)
            )
            if all_ids:
                ids = all_ids[number % len(all_ids)]
                self.runner.run(self.world.foreign(tenant, operation, ids, f"{SECRETS[tenant]} {number}"))

    @rule(tenant=tenants, operations=st.lists(on_responses, min_size=1, max_size=3), stream=st.booleans())
    def use_a_response_that_another_receives_now(self, tenant: str, operations: list[Operation], stream: bool) -> None:
        other = TENANTS[TENANTS.index(tenant) - 1]
        text = f"{SECRETS[other]} slowly!"
        response = json.loads(self._ask(other, "POST", "/responses", ask(text, background=True)).body)["id"]
        for operation in operations:
            self.runner.run(self.world.foreign(tenant, operation, [response], SECRETS[tenant]))
        self._ask(other, "GET", f"/responses/{response}{'?stream=true' if stream else ''}")

    def _ask(self, tenant: str, method: str, path: str, body: Any = None, **fields: Any) -> Any:
        return self.runner.run(self.world.ask(tenant, method, path, body, **fields))


def test_no_tenant_receives_a_byte_of_anothers_data(tmp_path: Path) -> None:
    with world_of_tenants(tmp_path) as (world, runner):
        Tenants.world, Tenants.runner = world, runner
        rules = settings(
            max_examples=max(1, STEPS // _STEPS_EACH),
            stateful_step_count=_STEPS_EACH,
            database=None,
            phases=[Phase.generate],  # the stack does not forget, so a shorter story is another one
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        try:
            run_state_machine_as_test(Tenants, settings=rules)
        finally:
            print(dict(world.counts), *world.steps, sep="\n")


def test_every_operation_answers_anothers_id_like_an_unknown_one(tmp_path: Path) -> None:
    with world_of_tenants(tmp_path) as (world, runner):
        operations: set[str] = set()
        for operation in OPERATIONS:
            for known_ids in (world.of("b", operation.kind), world.pairs("a", operation.kind, "b")):
                for ids in known_ids[:2]:
                    runner.run(world.foreign("a", operation, ids, SECRETS["a"]))
                    operations.add(str(operation))
        missing = {str(each) for each in OPERATIONS} - operations
        assert not {each for each in missing if "container" not in each}, missing
