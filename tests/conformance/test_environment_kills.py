"""Environments of sessions whose workers are killed in each of their states, over each shared store.

Nothing that a turn has saved is lost, no command runs twice, the numbers of the events have no gap, and no container,
file or environment outlives its session. STACK_KILL_TRIALS says how many times each state is aimed at (twice by
default), STACK_KILL_SEED what is drawn, which is printed.
"""

import asyncio
import itertools
import os
import random
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conformance.test_session_kills import BOUND_S, SEED, ask, post, read_events, rest, say
from tests.support.sdk.environments import PYTHON, shell
from tests.support.sdk.input_model import MODEL, play
from tests.support.servers.worker_processes import Workers, worker_processes
from tests.support.waiting import until, until_empty

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "2"))
Json = dict[str, Any]
DAY_S = 86_400
EXPIRY_S = 2.0
SETUP = [{"command": "echo set >> setup; sleep 0.3; echo up >> setup"}]
LIFE = re.compile(
    r"pending ready connected"
    r"( disconnected( reset)? connected| suspended( ready)? connected)*( suspended( ready suspended)*( expired)?)? "
)
"""The events of an environment, also where its workers are killed."""
numbers = itertools.count()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.timeout(120 + 7 * 60 * TRIALS),
]


@dataclass
class Life:
    """A session with an environment, and the commands that its turns run."""

    workers: Workers
    dice: random.Random
    id: str = ""
    environment_id: str = ""
    commands: list[str] = field(default_factory=list[str])

    async def begin(self) -> None:
        """Create the session with its first turn."""
        body = {
            "agent": {"model": "scripted"},
            "environment": {"type": "openai_hosted", "setup_commands": SETUP},
            "input": self.build_input("true"),
        }
        session = await ask(self.workers, "POST", "", f"environment {next(numbers)}", json=body)
        self.id, self.environment_id = session["id"], session["environment"]["id"]

    def build_input(self, then: str) -> str:
        """Return the input of a turn that notes its number, puts out a file, and runs `then`."""
        number = len(self.commands)
        self.commands.append(f"echo {number} >> log; echo {number} > outputs/{number}; {then}")
        return play([shell(self.commands[-1], id=f"c{number}")])

    async def run_turn(self, then: str = "true") -> None:
        await post(self.workers, self.id, say(self.build_input(then)))

    async def rest(self) -> None:
        await rest(self.workers, self.id)

    async def until_environment(self, *statuses: str) -> None:
        async def has_status() -> bool:
            return await self.load_status() in statuses

        await until(has_status, BOUND_S)

    async def load_status(self) -> str:
        answer = await self.workers.ask("GET", f"/agents/environments/{self.environment_id}", headers=BETA)
        return answer.json()["status"] if answer.status_code == 200 else f"error {answer.status_code}"

    async def until_item(self, item_type: str, count: int) -> None:
        """Wait until the session has as many items of a type."""

        async def has_item() -> bool:
            return [item["type"] for item in await self.list_items()].count(item_type) >= count

        await until(has_item, BOUND_S)

    async def list_items(self) -> list[Json]:
        return (await ask(self.workers, "GET", f"/{self.id}/items?limit=100&order=asc"))["data"]

    async def kill(self, within_s: float = 0.0) -> None:
        """Kill one worker or all, at any moment of that time."""
        await asyncio.sleep(self.dice.choice((0.0, self.dice.uniform(0, within_s))))
        processes = self.workers.processes()
        for process in processes if self.dice.random() < 0.5 else processes[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


BETA = {"OpenAI-Beta": "agents=v1"}
Aim = Callable[[Life], Awaitable[None]]
"""Brings a session into a state, and kills workers in it."""


async def prepare(life: Life) -> None:
    await life.kill(0.6)


async def run_command(life: Life) -> None:
    await life.rest()
    await life.run_turn("echo begun; sleep 1")
    await life.until_item("command_execution", 2)
    await life.kill(0.3)


async def collect_artifacts(life: Life) -> None:
    """The model has said its last word: the workspace is saved, and its outputs are copied."""
    await life.rest()
    await life.run_turn("for i in 1 2 3 4 5; do head -c 200000 /dev/urandom > outputs/large$i; done")
    await life.until_item("message", 4)
    await life.kill(0.2)


async def suspend(life: Life) -> None:
    await life.rest()
    if life.dice.random() < 0.5:
        await life.until_environment("suspended")
        await life.kill()
    else:
        await life.kill(1.5)
    await life.until_environment("suspended")

    async def list_containers() -> list[str]:
        return await list_ids(life.workers, "/containers")

    await until_empty(list_containers, 30)


async def resume(life: Life) -> None:
    await life.rest()
    await life.until_environment("suspended")
    await life.run_turn()
    await life.kill(0.5)


async def be_deleted(life: Life) -> None:
    """The session is at rest, or its environment is still prepared; `check_deletion` asks again."""
    await life.rest()
    deletion = asyncio.create_task(life.workers.ask("DELETE", f"/agents/sessions/{life.id}", headers=BETA))
    await life.kill(0.05)
    await deletion


async def be_deleted_early(life: Life) -> None:
    body = {"agent": {"model": "scripted"}, "environment": {"type": "openai_hosted", "setup_commands": SETUP}}
    session = await ask(life.workers, "POST", "", f"environment {next(numbers)}", json=body)
    life.id, life.environment_id = session["id"], session["environment"]["id"]
    await asyncio.sleep(life.dice.uniform(0, 0.5))
    deletion = asyncio.create_task(life.workers.ask("DELETE", f"/agents/sessions/{life.id}", headers=BETA))
    await life.kill(0.05)
    await deletion


async def expire(life: Life) -> None:
    await life.rest()
    await life.until_environment("suspended", "expired")
    await life.kill(EXPIRY_S + 0.5)
    await life.until_environment("expired")


async def list_ids(workers: Workers, path: str) -> list[str]:
    answer = await workers.ask("GET", f"{path}?limit=100", headers=BETA)
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["data"]]


async def check_events(life: Life, status: str) -> list[str]:
    """The numbers of the events have no gap, and the environment has only the states that follow one another. Return
    the turns whose work was lost with the container, before it was saved."""
    events = await read_events(life.workers, life.id)
    assert [event["sequence_number"] for event in events] == [*range(1, len(events) + 1)]
    kinds = [event["type"].removeprefix("agent.session.") for event in events]
    states = "".join(f"{kind.removeprefix('environment.')} " for kind in kinds if kind.startswith("environment."))
    assert LIFE.fullmatch(states), states
    last = [kind for kind in kinds if not kind.startswith("environment.")][-1]
    assert (kinds.count("turn.created"), last) == (len(life.commands), status), kinds
    assert kinds.count("turn.completed") == len(life.commands) - (status == "failed"), kinds
    return [event["turn_id"] for event in events if event["type"] == "agent.session.environment.reset"]


async def check_work(life: Life) -> None:
    """Each command is there once. Those that ended have left what they wrote, unless the events say that it was lost,
    and each turn has what it put out as its artifacts once."""
    await life.rest()
    await life.run_turn("cat log; echo; cat setup")
    await life.rest()
    lost_turns = await check_events(life, "idle")
    commands = [item for item in await life.list_items() if item["type"] == "command_execution"]
    assert [item["command"] for item in commands] == life.commands
    assert (commands[-1]["status"], commands[-1]["exit_code"]) == ("completed", 0)
    log, _, setup = commands[-1]["output"].partition("\n\n")
    assert setup == "set\nup\n"
    noted = log.split()
    is_kept = [item["status"] == "completed" and item["turn_id"] not in lost_turns for item in commands]
    done = [str(number) for number, counts in enumerate(is_kept) if counts]
    assert noted == sorted({*noted}), noted
    assert {*done} <= {*noted}, (done, noted)
    await check_artifacts(life, [item["turn_id"] for item in commands], done)


async def check_artifacts(life: Life, turn_ids: list[str], done: list[str]) -> None:
    artifacts: list[Json] = (await ask(life.workers, "GET", f"/{life.id}/artifacts?limit=100&order=asc"))["data"]
    paths = [(each["turn_id"], each["path"].removeprefix("/workspace/outputs/")) for each in artifacts]
    assert len({*paths}) == len(paths)
    for number in done:
        for turn_id in turn_ids[int(number) :]:
            is_whole = str(turn_ids.index(turn_id)) in done
            assert not is_whole or (turn_id, number) in paths, (number, turn_id, paths)
    for artifact in artifacts:
        path = f"/agents/sessions/{life.id}/artifacts/{artifact['id']}/content"
        content = await life.workers.ask("GET", path, headers=BETA)
        name = artifact["path"].rpartition("/")[2]
        assert content.status_code == 200, content.text
        assert content.content == f"{name}\n".encode() or name.startswith("large")
        assert len(content.content) == artifact["size_bytes"]
    assert len(await list_ids(life.workers, "/files")) == len(artifacts)


async def check_deletion(life: Life) -> None:
    """Nothing of a deleted session is left."""
    answer = await life.workers.ask("DELETE", f"/agents/sessions/{life.id}", headers=BETA)
    assert answer.status_code == 200, answer.text
    assert await life.load_status() == "error 404"
    for path in ("/agents/sessions", "/agents/environments", "/files", "/conversations"):
        assert await list_ids(life.workers, path) == [], path

    async def list_containers() -> list[str]:
        return await list_ids(life.workers, "/containers")

    await until_empty(list_containers, 15)  # one that was just prepared ends as its worker notices


GROUPS: dict[str, tuple[Json, tuple[Aim, ...]]] = {
    "in use": ({}, (prepare, run_command, collect_artifacts, be_deleted, be_deleted_early)),
    "idle": ({"environment_idle_s": 1}, (suspend, resume)),
    "over": ({"environment_idle_s": 1, "environment_days": EXPIRY_S / DAY_S}, (expire,)),
}


@pytest.mark.parametrize("group", [*GROUPS])
async def test_no_kill_in_any_state_of_an_environment_loses_repeats_or_leaves_anything(
    shared_store: Json, tmp_path: Path, group: str
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(f"{SEED} {group} {shared_store['provider']}")
    times, aims = GROUPS[group]
    more = {
        "inference": MODEL,
        "tool_runtime": PYTHON,
        "files": {"provider": "kv"},
        "agents": {"provider": "kv", "lease_s": 1.5, "poll_s": 0.1, "retry_s": 0.1, **times},
    }
    async with worker_processes(tmp_path, shared_store, workers=2, more=more) as workers:
        for trial, aim in itertools.product(range(TRIALS), aims):
            life = Life(workers, dice)
            if aim is not be_deleted_early:
                await life.begin()
            await aim(life)
            print(f"{shared_store['provider']} {aim.__name__} {trial}")
            if aim is expire:
                await life.run_turn()
                await until(lambda: has_failed(workers, life.id), BOUND_S)  # noqa: B023 - awaited here
                await check_events(life, "failed")
            elif aim not in (be_deleted, be_deleted_early):
                await check_work(life)
            await check_deletion(life)


async def has_failed(workers: Workers, session_id: str) -> bool:
    return (await ask(workers, "GET", f"/{session_id}"))["status"] == "failed"
