"""The SDK's `client.skills`: skills that are stored in versions, and mounted by reference in containers."""

import asyncio
import io
import shutil
import stat
import zipfile
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError, PermissionDeniedError
from openai.types import DeletedSkill, Skill
from openai.types.skills import DeletedSkillVersion, SkillVersion

from apis.errors import InvalidRequest
from apis.skills.bundle import SkillFile
from providers.kv_store.memory import Memory
from providers.skills.kv import StoredSkills
from tests.spec.accounts.test_stored_keys import STORED, new_key
from tests.spec.tools.test_container_shell import container_of, outputs, shell
from tests.support.models.skill_archives import FRONT_MATTER, entry, pack
from tests.support.sdk.client import sdk_client
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import create, refusal
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
Json = dict[str, Any]
KEYS = [
    {"key": "key-of-a", "tenant": "a"},
    {"key": "key-of-b", "tenant": "b"},
]


def skill_text(name: str = "greeting", description: str = "Greets people.") -> str:
    return f"---\nname: {name}\ndescription: {description}\n---\nRun greet.sh.\n"


def archive(words: str, name: str = "greeting") -> bytes:
    script = entry(f"{name}/greet.sh", stat.S_IFREG | 0o755)
    return pack((f"{name}/SKILL.md", skill_text(name, f"Says {words}.")), (script, f"#!/bin/sh\necho {words}\n"))


def zipped(data: bytes) -> tuple[str, bytes, str]:
    return ("skill.zip", data, "application/zip")


def assert_complete(value: Any, kind: type[Any]) -> None:
    kind.model_validate(value.to_dict(), strict=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    limits = {"skills": {"provider": "kv", "max_versions": 4}}
    python = {"provider": "python", "timeout_s": 5} if shutil.which("bwrap") else None
    async with serving(MODEL, tool_runtime=python, server={"api_keys": KEYS}, more=limits) as running:
        yield running


@pytest.fixture
def skills(served: Served) -> Any:
    return served.client.skills


def reference(skill_id: str, **fields: str) -> Json:
    skill = {"type": "skill_reference", "skill_id": skill_id, **fields}
    return {"type": "shell", "environment": {"type": "container_auto", "skills": [skill]}}


async def test_a_skill_of_one_archive_is_created_read_and_deleted(skills: Any) -> None:
    data = archive("one")
    skill = await skills.create(files=zipped(data))
    assert_complete(skill, Skill)
    assert (skill.name, skill.description, skill.default_version, skill.latest_version) == (
        *("greeting", "Says one."),
        *("1", "1"),
    )
    assert await skills.retrieve(skill.id) == skill
    assert (await skills.content.retrieve(skill.id)).content == data
    deleted = await skills.delete(skill.id)
    assert_complete(deleted, DeletedSkill)
    for call in (skills.retrieve, skills.delete, skills.content.retrieve, skills.versions.list):
        with pytest.raises(NotFoundError) as missing:
            await call(skill.id)
        assert missing.value.param == "skill_id"


async def test_a_skill_of_a_folder_is_packed_and_its_scripts_are_executable(skills: Any) -> None:
    files = [("greeting/SKILL.md", FRONT_MATTER.encode()), ("greeting/bin/greet.sh", b"#!/bin/sh\necho Hi\n")]
    skill = await skills.create(files=files)
    stored = zipfile.ZipFile(io.BytesIO((await skills.content.retrieve(skill.id)).content))
    assert [(info.filename, stored.read(info)) for info in stored.infolist()] == files
    modes = [info.external_attr >> 16 & 0o777 for info in stored.infolist()]
    assert modes == [0o644, 0o755]
    await skills.delete(skill.id)


async def test_versions_are_numbered_and_one_of_them_is_the_default(skills: Any) -> None:
    skill = await skills.create(files=zipped(archive("one")))
    second = await skills.versions.create(skill.id, files=zipped(archive("two")))
    assert_complete(second, SkillVersion)
    assert (second.version, second.description, second.skill_id) == ("2", "Says two.", skill.id)
    third = await skills.versions.create(skill.id, files=zipped(archive("three")), default=True)
    now = await skills.retrieve(skill.id)
    assert (now.default_version, now.latest_version, now.description) == ("3", "3", "Says three.")
    changed = await skills.update(skill.id, default_version="2")
    assert (changed.default_version, changed.latest_version, changed.description) == ("2", "3", "Says two.")
    assert [each.version async for each in skills.versions.list(skill.id, limit=1)] == ["3", "2", "1"]
    assert [each.id async for each in skills.versions.list(skill.id, order="asc", after=second.id)] == [third.id]
    assert await skills.versions.retrieve("latest", skill_id=skill.id) == third
    assert (await skills.content.retrieve(skill.id)).content == archive("two")
    assert (await skills.versions.content.retrieve("3", skill_id=skill.id)).content == archive("three")
    with pytest.raises(BadRequestError) as refused:
        await skills.versions.delete("2", skill_id=skill.id)
    assert refused.value.param == "version"
    deleted = await skills.versions.delete("3", skill_id=skill.id)
    assert_complete(deleted, DeletedSkillVersion)
    assert (deleted.id, deleted.version) == (third.id, "3")
    assert (await skills.retrieve(skill.id)).latest_version == "2"
    fourth = await skills.versions.create(skill.id, files=zipped(archive("four")))
    assert fourth.version == "4", "a number stands for one content for ever"
    for number in ("4", "1"):
        await skills.versions.delete(number, skill_id=skill.id)
    await skills.versions.delete("2", skill_id=skill.id)
    with pytest.raises(NotFoundError):
        await skills.retrieve(skill.id)


async def test_skills_are_listed_in_pages_by_their_creation(skills: Any) -> None:
    skill_ids = [(await skills.create(files=zipped(archive("x", f"skill-{number}")))).id for number in range(3)]
    assert [each.id async for each in skills.list(limit=2, order="asc")] == skill_ids
    assert [each.id async for each in skills.list(limit=2)] == skill_ids[::-1]
    await skills.delete(skill_ids[1])
    assert [each.id for each in (await skills.list(after=skill_ids[1], order="asc")).data] == [skill_ids[2]]
    with pytest.raises(BadRequestError) as refused:
        await skills.list(after="skill_none")
    assert refused.value.param == "after"
    for skill_id in (skill_ids[0], skill_ids[2]):
        await skills.delete(skill_id)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (zipped(b"PK no archive"), "cannot be read"),
        (zipped(pack(("a/readme.md", "x"))), "no SKILL.md"),
        ([("a/SKILL.md", skill_text().encode()), ("a/../../b", b"x")], "no path within"),
        ([("a/SKILL.md", skill_text().encode()), ("a/SKILL.md", b"x")], "same path"),
        ([("SKILL.md", skill_text("No Name").encode())], "lower-case"),
        ([("SKILL.md", skill_text().encode()), *((f"f{number}", b"") for number in range(200))], "200 files"),
        (zipped(pack(("SKILL.md", skill_text()), ("big", b"0" * (9 << 20)))), "8 MiB"),
    ],
)
async def test_files_that_are_no_skill_are_refused_with_the_reason(skills: Any, files: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as refused:
        await skills.create(files=files)
    assert refused.value.param == "files"
    assert (await skills.list()).data == []


async def test_a_form_without_files_and_wrong_fields_are_refused_by_name(skills: Any, served: Served) -> None:
    with pytest.raises(BadRequestError) as refused:
        await served.client.post(
            "/skills",
            cast_to=object,
            files={"other": b"x"},
            options={"headers": {"content-type": "multipart/form-data"}},
        )
    assert refused.value.param == "files"
    skill = await skills.create(files=zipped(archive("one")))
    with pytest.raises(BadRequestError) as refused:
        await skills.update(skill.id, default_version="9")
    assert refused.value.param == "default_version"
    with pytest.raises(BadRequestError) as refused:
        await skills.versions.create(skill.id, files=zipped(archive("two")), default="perhaps")
    assert refused.value.param == "default"
    for number in range(2, 5):
        assert (await skills.versions.create(skill.id, files=zipped(archive("two")))).version == str(number)
    with pytest.raises(BadRequestError, match=r"skills\.max_versions") as refused:
        await skills.versions.create(skill.id, files=zipped(archive("two")))
    assert refused.value.code == "storage_quota_exceeded"
    await skills.delete(skill.id)


async def test_another_tenants_skill_is_an_unknown_one(skills: Any, served: Served) -> None:
    skill = await skills.create(files=zipped(archive("one")))
    async with sdk_client(served.url, "key-of-b") as client:
        other: Any = client.skills
        assert (await other.list()).data == []
        for call in (
            other.retrieve(skill.id),
            other.update(skill.id, default_version="1"),
            other.delete(skill.id),
            other.content.retrieve(skill.id),
            other.versions.list(skill.id),
            other.versions.create(skill.id, files=zipped(archive("two"))),
            other.versions.retrieve("1", skill_id=skill.id),
            other.versions.delete("1", skill_id=skill.id),
            other.versions.content.retrieve("1", skill_id=skill.id),
        ):
            with pytest.raises(NotFoundError) as missing:
                await call
            assert missing.value.param == "skill_id"
    assert await skills.retrieve(skill.id) == skill
    await skills.delete(skill.id)


async def test_a_key_needs_the_scope_of_files() -> None:
    async with serving(MODEL, more={**STORED, "skills": {"provider": "kv"}}) as keyed:
        keys = [(await new_key(keyed, "alpha", scope)).value for scope in ("files", "responses")]
        async with sdk_client(keyed.url, keys[0]) as client:
            await client.skills.create(files=zipped(archive("one")))
        async with sdk_client(keyed.url, keys[1]) as client:
            with pytest.raises(PermissionDeniedError):
                await client.skills.create(files=zipped(archive("one")))


@needs_bubblewrap
async def test_a_reference_mounts_the_version_that_it_names(served: Served, skills: Any) -> None:
    skill = await skills.create(files=zipped(archive("one")))
    await skills.versions.create(skill.id, files=zipped(archive("two")))
    await skills.versions.create(skill.id, files=zipped(archive("three")))
    run = shell("/mnt/skills/greeting/greet.sh")
    said: list[str] = []
    for fields in ({}, {"version": "2"}, {"version": "latest"}):
        response = await create(served, input=play([run]), tools=[reference(skill.id, **fields)])
        said += [text for text, _, _ in outputs(response.output[1])]
        assert response.tools[0].environment.skills[0].skill_id == skill.id
    assert said == ["one\n", "two\n", "three\n"]
    await skills.update(skill.id, default_version="3")
    changed = await create(served, input=play([run]), tools=[reference(skill.id)])
    assert outputs(changed.output[1]) == [("three\n", "", 0)]
    containers: Any = served.client.containers
    container = await containers.create(name="c", skills=[{"type": "skill_reference", "skill_id": skill.id}])
    named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container.id}}
    assert outputs((await create(served, input=play([run]), tools=[named])).output[1]) == [("three\n", "", 0)]
    await skills.delete(skill.id)


@needs_bubblewrap
async def test_a_chain_keeps_the_container_of_its_reference(served: Served, skills: Any) -> None:
    skill = await skills.create(files=zipped(archive("one")))
    first = await create(served, input=play([shell("touch a")]), tools=[reference(skill.id)])
    again = await create(
        served, input=play([shell("ls", id="c2")]), tools=[reference(skill.id)], previous_response_id=first.id
    )
    assert container_of(again) == container_of(first)
    assert outputs(again.output[1]) == [("a\n", "", 0)]
    await skills.delete(skill.id)


@needs_bubblewrap
async def test_a_reference_to_nothing_is_refused_by_its_place(served: Served, skills: Any) -> None:
    skill = await skills.create(files=zipped(archive("one")))
    place = "tools[0].environment.skills[0]"
    assert (await refusal(served, 404, tools=[reference("skill_1")]))["param"] == f"{place}.skill_id"
    assert (await refusal(served, 404, tools=[reference(skill.id, version="2")]))["param"] == f"{place}.version"
    twice = reference(skill.id)
    twice["environment"]["skills"] *= 2
    assert (await refusal(served, tools=[twice]))["param"] == "tools[0].environment.skills[1].skill_id"
    await skills.delete(skill.id)


async def test_workers_that_change_one_skill_at_once_lose_nothing() -> None:
    store = Memory(Memory.Config())
    config = StoredSkills.Config(max_tenant_skills=2)
    one, other = StoredSkills(config, store), StoredSkills(config, store)
    files = [SkillFile("SKILL.md", skill_text().encode())]
    skill = await one.create(files, tenant="t")
    outcomes = await asyncio.gather(
        *(each.create_version(skill.id, files, is_default=False, tenant="t") for each in (one, other) for _ in range(5))
    )
    assert {int(version.version) for version in outcomes} == set(range(2, 12))
    created = await asyncio.gather(
        *(each.create(files, tenant="t") for each in (one, other, one)), return_exceptions=True
    )
    assert sum(isinstance(each, InvalidRequest) for each in created) == 2
    for each in created:
        if isinstance(each, Skill):
            await other.delete(each.id, tenant="t")
    await one.delete(skill.id, tenant="t")
    assert await store.scan("t/") == []
    assert (await one.create(files, tenant="t")).latest_version == "1"
