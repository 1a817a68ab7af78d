"""Skills that a request brings with it, in the containers of the shell."""

import shutil
import stat
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError

from tests.spec.tools.test_container_shell import container_of, outputs, shell
from tests.support.models.skill_archives import FRONT_MATTER, entry, inline, pack
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import chat_requests, create, refusal
from tests.support.servers.serving import Served, serving

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

Json = dict[str, Any]
ARCHIVE = pack(
    ("greeting/SKILL.md", FRONT_MATTER),
    (entry("greeting/greet.sh", stat.S_IFREG | 0o755), "#!/bin/sh\necho Hello, $1\n"),
    ("greeting/data/names.txt", "Ada\n"),
)
READ = shell("cat /mnt/skills/greeting/SKILL.md", "/mnt/skills/greeting/greet.sh $(cat /mnt/skills/*/data/names.txt)")


def tool(*skills: Json) -> Json:
    return {"type": "shell", "environment": {"type": "container_auto", "skills": [*skills]}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(MODEL, tool_runtime={"provider": "python", "timeout_s": 5}) as served:
        yield served


async def test_a_model_reads_of_a_skill_and_runs_what_is_in_it(served: Served) -> None:
    response = await create(served, input=play([READ]), tools=[tool(inline(ARCHIVE))])
    ((offered,),) = [chat.tools for chat in chat_requests(served)[-1:] if chat.tools]
    assert "- greeting (/mnt/skills/greeting): Greets people." in offered.model_dump()["function"]["description"]
    assert outputs(response.output[1]) == [(FRONT_MATTER, "", 0), ("Hello, Ada\n", "", 0)]
    (echoed,) = response.tools[0].environment.skills
    assert (echoed.name, echoed.source.data) == ("greeting", "")


async def test_programs_cannot_change_a_skill(served: Served) -> None:
    attempts = [
        "echo x >> /mnt/skills/greeting/SKILL.md",
        "touch /mnt/skills/greeting/new",
        "rm -rf /mnt/skills/greeting",
        "mv /mnt/skills/greeting /mnt/skills/other",
        "chmod 777 /mnt/skills/greeting/SKILL.md",
    ]
    response = await create(
        served, input=play([shell(*attempts)], [READ | {"id": "c2"}]), tools=[tool(inline(ARCHIVE))]
    )
    _, tried, _, read, _ = response.output
    refusals = [(code != 0, "ead-only" in stderr or "denied" in stderr) for _, stderr, code in outputs(tried)]
    assert refusals == [(True, True)] * len(attempts)
    assert outputs(read)[1] == ("Hello, Ada\n", "", 0)


async def test_a_chain_keeps_its_container_while_its_skills_are_the_same(served: Served) -> None:
    other = pack(("SKILL.md", FRONT_MATTER.replace("greeting", "parting")))
    first = await create(served, input=play([shell("touch a")]), tools=[tool(inline(ARCHIVE))])
    chained: Json = {"previous_response_id": first.id}
    again = await create(served, input=play([shell("ls", id="c2")]), tools=[tool(inline(ARCHIVE))], **chained)
    more = tool(inline(ARCHIVE), inline(other, "parting"))
    changed = await create(served, input=play([shell("ls", "ls /mnt/skills", id="c3")]), tools=[more], **chained)
    assert outputs(again.output[1]) == [("a\n", "", 0)]
    assert container_of(again) == container_of(first) != container_of(changed)
    assert outputs(changed.output[1]) == [("", "", 0), ("greeting\nparting\n", "", 0)]


async def test_a_background_run_has_its_skills(served: Served) -> None:
    response = await create(served, input=play([READ]), tools=[tool(inline(ARCHIVE))], background=True)
    responses: Any = served.client.responses
    events = [event async for event in await responses.retrieve(response.id, stream=True)]
    assert outputs(events[-1].response.output[1])[1] == ("Hello, Ada\n", "", 0)


async def test_containers_of_their_own_may_have_skills_too(served: Served) -> None:
    containers: Any = served.client.containers
    container = await containers.create(name="mine", skills=[inline(ARCHIVE)])
    named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container.id}}
    response = await create(served, input=play([READ]), tools=[named])
    assert outputs(response.output[1])[1] == ("Hello, Ada\n", "", 0)
    with pytest.raises(BadRequestError) as caught:
        await containers.create(name="mine", skills=[inline(b"PK")])
    assert caught.value.param == "skills[0].source.data"


@pytest.mark.parametrize(
    ("skills", "param"),
    [
        ([inline(b"no archive")], "skills[0].source.data"),
        ([inline(ARCHIVE) | {"source": {**inline(ARCHIVE)["source"], "data": "*"}}], "skills[0].source.data"),
        ([inline(ARCHIVE, "other")], "skills[0].name"),
        ([inline(ARCHIVE), inline(ARCHIVE)], "skills[1].name"),
    ],
)
async def test_a_skill_that_cannot_be_is_refused_by_its_place(served: Served, skills: list[Json], param: str) -> None:
    error = await refusal(served, tools=[tool(*skills)])
    assert error["param"] == f"tools[0].environment.{param}"


async def test_a_limit_that_ends_the_programs_leaves_the_skills(served: Served) -> None:
    script: list[Script] = [[shell("kill -9 -1; head -c 900M /dev/zero | tail > /dev/null")], [READ | {"id": "c2"}]]
    response = await create(served, input=play(*script), tools=[tool(inline(ARCHIVE))])
    assert outputs(response.output[3])[1] == ("Hello, Ada\n", "", 0)
