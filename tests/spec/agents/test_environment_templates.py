"""Templates of environments through the official SDK, and what of environments can be read in the store."""

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.sdk.client import sdk_client
from tests.support.sdk.environments import MORE, PYTHON, commands_of, hosted, inline, run_hosted, shell
from tests.support.sdk.input_model import MODEL
from tests.support.sdk.sessions import list_items
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
SECRET = "a-secret-of-a-template"
VAULTS: Json = {"provider": "kv", "keys": ["k" * 32]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    store = {"provider": "sqlite", "path": str(database := tmp_path_factory.mktemp("templates") / "store.db")}
    more = {**MORE, "vaults": VAULTS}
    async with serving(MODEL, kv_store=store, tool_runtime=PYTHON, server={"api_keys": KEYS}, more=more) as served:
        yield served
    assert SECRET.encode() not in read_files(database)


def read_files(database: Path) -> bytes:
    return b"".join(path.read_bytes() for path in database.parent.iterdir())


async def test_templates_are_created_changed_listed_and_deleted(served: Served) -> None:
    templates: Any = served.client.beta.agents.environments.templates
    files = [inline("/workspace/a.txt", "four")]
    template = await templates.create(
        name="mine", env={"A": SECRET}, files=files, setup_commands=[{"command": f"echo {SECRET}"}]
    )
    visible = template.to_dict()
    assert visible.pop("id") == template.id
    assert visible.pop("created_at") == visible.pop("updated_at")
    assert visible == {
        "object": "agent.environment.template",
        "name": "mine",
        "capability_directories": [],
        "desktop": None,
        "files": [{"type": "inline", "path": "/workspace/a.txt", "size_bytes": 4}],
        "network": {"access": "disabled", "allowed_domains": []},
        "packages": {"npm": [], "python": [], "system": []},
        "plugins": [],
        "skills": [],
    }
    other = await templates.create()
    assert [each.id async for each in templates.list(limit=1)] == [other.id, template.id]
    changed = await templates.update(template.id, name=None, files=None, packages={"python": ["six"]})
    assert (changed.name, changed.files, changed.packages.python) == (None, [], ["six"])
    assert (await templates.retrieve(template.id)).to_dict() == changed.to_dict()
    async with sdk_client(served.url, "key-b") as stranger:
        with pytest.raises(openai.NotFoundError):
            await stranger.beta.agents.environments.templates.retrieve(template.id)
    assert (await templates.delete(template.id)).to_dict() == {
        "id": template.id,
        "object": "agent.environment.template.deleted",
        "deleted": True,
    }
    for gone in (templates.retrieve, templates.update, templates.delete):
        with pytest.raises(openai.NotFoundError):
            await gone(template.id)


async def test_an_environment_has_the_fields_of_its_template_and_its_own(served: Served) -> None:
    templates: Any = served.client.beta.agents.environments.templates
    files = [inline("/workspace/a.txt", "of the template")]
    folder = "/mnt/tmp/npm/node_modules/.bin"  # where packages of npm have their programs
    setup: Any = [{"command": f"mkdir -p {folder}; echo 'echo x' > {folder}/tool; chmod +x {folder}/tool"}]
    template = await templates.create(env={"A": SECRET, "B": "b"}, files=files, setup_commands=setup)
    turn = [shell("cat a.txt; tool; echo ${#A}")]
    session = await run_hosted(served.client, turn, environment_template_id=template.id)
    assert commands_of(await list_items(served.client, session.id)) == [
        (f"of the templatex\n{len(SECRET)}\n", 0, "completed")
    ]
    own = {"env": {"A": "own", "C": SECRET}, "environment_template_id": template.id}
    session = await run_hosted(served.client, [shell("echo $A $B; cat a.txt")], **own)
    assert commands_of(await list_items(served.client, session.id)) == [("own\nof the template", 0, "completed")]


@pytest.mark.parametrize(
    ("template", "network", "is_refused"),
    [
        ({}, {"access": "restricted", "allowed_domains": ["a.example"]}, True),
        ({}, {"access": "disabled"}, False),
        ({"network": {"access": "disabled"}}, {"access": "enabled"}, True),
    ],
)
async def test_a_network_is_no_wider_than_that_of_the_template(
    served: Served, template: Json, network: Json, is_refused: bool
) -> None:
    environments: Any = served.client.beta.agents.environments
    created = await environments.templates.create(**template)
    configuration = hosted(environment_template_id=created.id, network=network)
    if not is_refused:
        await environments.create(environment=configuration)
        return
    with pytest.raises(openai.BadRequestError) as refused:
        await environments.create(environment=configuration)
    assert refused.value.param == "environment.network"


async def test_wrong_templates_are_refused_by_name(served: Served) -> None:
    environments: Any = served.client.beta.agents.environments
    with pytest.raises(openai.NotFoundError) as unknown:
        await environments.create(environment=hosted(environment_template_id="envtmpl_x"))
    assert unknown.value.param == "environment.environment_template_id"
    with pytest.raises(openai.BadRequestError) as wrong:
        await environments.templates.create(files=[inline("/etc/a", "x")])
    assert wrong.value.param == "files[0].path"


async def test_without_keys_the_configuration_is_stored_as_it_is(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(MODEL, kv_store=store, tool_runtime=PYTHON, more=MORE) as served:
        await served.client.beta.agents.environments.templates.create(env={"A": SECRET})
    assert SECRET.encode() in read_files(tmp_path / "store.db")
