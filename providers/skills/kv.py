"""StoredSkills: skills of requests, and those that tenants have stored in the stack's own KVStore."""

import asyncio
import time
from collections.abc import Callable, Sequence

from openai.types.skill import Skill
from openai.types.skills import SkillVersion
from pydantic import Field

from apis.errors import InvalidRequest, NotFound
from apis.provider import Provider
from apis.skills.bundle import SkillBundle, SkillFile
from apis.skills.skills import Skills
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page, page_after
from apis.storage.records import decode_record, encode_record, scan_all
from apis.wire.base import ListParams
from apis.wire.tools import InlineSkill, SkillReference, SkillSource
from providers.common.state.change import write_prepared
from providers.common.state.scan import decode_or_skip, list_page
from providers.common.state.tenant_records import TenantRecords
from providers.skills.archives import read_files, read_inline
from providers.skills.bundle import MAX_BUNDLE_BYTES, MAX_FILES, read_bundle
from providers.skills.records import (
    StoredSkill,
    StoredVersion,
    archive_key,
    archive_prefix,
    is_skill_id,
    skill_not_found,
    version_not_found,
)


class StoredSkills(Skills):
    """Skills shared by all workers that share the store. A version appears in the same write as its archive, and goes
    in the same write."""

    class Config(Provider.Config):
        """Bounds of the skills of one tenant, and of the versions of one skill, each of 8 MiB at most."""

        max_tenant_skills: int = Field(default=200, ge=1, le=100_000)
        max_versions: int = Field(default=50, ge=1, le=1000)

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        self.now: Callable[[], float] = time.time
        self.max_bundle_bytes = MAX_BUNDLE_BYTES
        self.max_files = MAX_FILES
        self._config = config
        self._kv = kv_store
        self._records = TenantRecords(kv_store, "skill", StoredSkill, skill_not_found)

    async def load(self, sources: Sequence[SkillSource], *, tenant: str) -> Sequence[SkillBundle]:
        bundles: dict[str, SkillBundle] = {}
        available_bytes, available_files = MAX_BUNDLE_BYTES, MAX_FILES
        for index, source in enumerate(sources):
            param = f"skills[{index}]"
            bundle = await self._load_one(source, param, tenant)
            if bundle.name in bundles:
                message = f"Two skills are named '{bundle.name}'."
                named = f"{param}.name" if isinstance(source, InlineSkill) else f"{param}.skill_id"
                raise InvalidRequest(message, param=named, code="invalid_value")
            available_bytes -= sum(len(file.data) for file in bundle.files)
            available_files -= len(bundle.files)
            if available_bytes < 0 or available_files < 0:
                message = f"All skills together have {MAX_FILES} files and {MAX_BUNDLE_BYTES >> 20} MiB at most."
                raise InvalidRequest(message, param=param, code="invalid_value")
            bundles[bundle.name] = bundle
        return list(bundles.values())

    async def create(self, files: Sequence[SkillFile], *, tenant: str) -> Skill:
        await self._kv.require_room(tenant)
        archive, bundle = await asyncio.to_thread(read_files, files)
        skill_id = f"skill_{new_id_key()}"
        version = self._new_version(1, bundle)
        skill = StoredSkill(version.created_at, 1, 2, [version])

        def build_error(count: int) -> InvalidRequest:
            message = f"You have {count} skills already (`skills.max_tenant_skills`). Delete some first."
            return InvalidRequest(message, param="files", code="storage_quota_exceeded")

        put_archive = Put(archive_key(tenant, skill_id, 1), archive)
        max_count = self._config.max_tenant_skills
        await self._records.create(tenant, skill_id, skill, max_count, build_error, [put_archive])
        return skill.to_wire(skill_id)

    async def list(self, params: ListParams, *, tenant: str) -> Page[Skill]:
        if params.after and not is_skill_id(params.after):
            raise InvalidRequest("There is no skill with this id.", param="after", code="invalid_value")
        prefix, last = self._records.key(tenant, ""), self._records.key(tenant, params.after) if params.after else ""
        page = await list_page(self._kv, prefix, StoredSkill, last, order=params.order, limit=params.limit)
        return page.map(lambda row: row.record.to_wire(row.key.removeprefix(prefix)))

    async def get(self, skill_id: str, *, tenant: str) -> Skill:
        return (await self._records.load(tenant, skill_id)).to_wire(skill_id)

    async def set_default(self, skill_id: str, version: str, *, tenant: str) -> Skill:
        def choose(skill: StoredSkill) -> Sequence[Op]:
            chosen = skill.find(version)
            if chosen is None:
                message = f"The skill has no version '{version}'."
                raise InvalidRequest(message, param="default_version", code="invalid_value")
            skill.default_number = chosen.number
            return ()

        return (await self._change_skill(skill_id, tenant, choose)).to_wire(skill_id)

    async def delete(self, skill_id: str, *, tenant: str) -> None:
        async def prepare() -> Sequence[Op]:
            return await self._prepare_deletion(skill_id, await self._records.get(tenant, skill_id), tenant)

        await write_prepared(self._kv, prepare)

    async def create_version(
        self, skill_id: str, files: Sequence[SkillFile], *, is_default: bool, tenant: str
    ) -> SkillVersion:
        await self._records.load(tenant, skill_id)
        await self._kv.require_room(tenant)
        archive, bundle = await asyncio.to_thread(read_files, files)

        def append(skill: StoredSkill) -> Sequence[Op]:
            if len(skill.versions) >= self._config.max_versions:
                message = f"The skill has {len(skill.versions)} versions already (`skills.max_versions`). Delete some."
                raise InvalidRequest(message, param="files", code="storage_quota_exceeded")
            version = self._new_version(skill.next_number, bundle)
            skill.versions.append(version)
            skill.next_number += 1
            if is_default:
                skill.default_number = version.number
            return [Put(archive_key(tenant, skill_id, version.number), archive)]

        return (await self._change_skill(skill_id, tenant, append)).versions[-1].to_wire(skill_id)

    async def list_versions(self, skill_id: str, params: ListParams, *, tenant: str) -> Page[SkillVersion]:
        skill = await self._records.load(tenant, skill_id)
        versions = [version.to_wire(skill_id) for version in skill.versions]
        ordered = versions if params.order == "asc" else versions[::-1]
        return page_after(ordered, params, lambda version: version.id, "The skill has no version with this id.")

    async def get_version(self, skill_id: str, version: str, *, tenant: str) -> SkillVersion:
        return _require_version(await self._records.load(tenant, skill_id), version).to_wire(skill_id)

    async def delete_version(self, skill_id: str, version: str, *, tenant: str) -> SkillVersion:
        deleted: StoredVersion | None = None

        async def prepare() -> Sequence[Op]:
            nonlocal deleted
            entry = await self._records.get(tenant, skill_id)
            skill = decode_record(entry, StoredSkill)
            deleted = _require_version(skill, version)
            if len(skill.versions) == 1:
                return await self._prepare_deletion(skill_id, entry, tenant)
            if deleted.number == skill.default_number:
                message = "The default version cannot be deleted: make another one the default first."
                raise InvalidRequest(message, param="version", code="invalid_value")
            skill.versions.remove(deleted)
            return [
                Put(self._records.key(tenant, skill_id), encode_record(skill), expect=entry.version),
                Delete(archive_key(tenant, skill_id, deleted.number)),
            ]

        await write_prepared(self._kv, prepare)
        assert deleted is not None
        return deleted.to_wire(skill_id)

    async def read_archive(self, skill_id: str, version: str | None, *, tenant: str) -> bytes:
        skill = await self._records.load(tenant, skill_id)
        number = _require_version(skill, version).number
        entry = await self._kv.get(archive_key(tenant, skill_id, number))
        if entry is None:  # deleted meanwhile
            raise version_not_found(str(number))
        return entry.value

    async def _load_one(self, source: SkillSource, param: str, tenant: str) -> SkillBundle:
        if isinstance(source, SkillReference):
            try:
                archive = await self.read_archive(source.skill_id, source.version, tenant=tenant)
            except NotFound as exc:
                exc.param = f"{param}.{exc.param}"
                raise
            return await asyncio.to_thread(read_bundle, archive)
        bundle = await asyncio.to_thread(read_inline, source, f"{param}.source.data")
        if bundle.name != source.name:
            message = f"The archive is the skill '{bundle.name}', as its SKILL.md says, not '{source.name:.64}'."
            raise InvalidRequest(message, param=f"{param}.name", code="invalid_value")
        return SkillBundle(bundle.name, source.description, bundle.files)

    def _new_version(self, number: int, bundle: SkillBundle) -> StoredVersion:
        return StoredVersion(number, f"skillver_{new_id_key()}", int(self.now()), bundle.name, bundle.description)

    async def _change_skill(
        self, skill_id: str, tenant: str, edit: Callable[[StoredSkill], Sequence[Op]]
    ) -> StoredSkill:
        """Store the skill as `edit` leaves it, together with the operations that `edit` returns."""
        more: Sequence[Op] = ()

        def edit_skill(skill: StoredSkill) -> StoredSkill:
            nonlocal more
            more = edit(skill)
            return skill

        return await self._records.change(tenant, skill_id, edit_skill, also=lambda _: more)

    async def _prepare_deletion(self, skill_id: str, entry: Entry, tenant: str) -> Sequence[Op]:
        """Return the operations that delete a skill, whose record may be damaged, with its archives."""
        skill = decode_or_skip(self._kv, self._records.key(tenant, skill_id), entry, StoredSkill)
        if skill is None:
            archives = [key async for key, _ in scan_all(self._kv, archive_prefix(tenant, skill_id), page_size=1)]
        else:
            archives = [archive_key(tenant, skill_id, version.number) for version in skill.versions]
        return [*await self._records.build_delete_ops(tenant, skill_id, entry), *(Delete(key) for key in archives)]


def _require_version(skill: StoredSkill, version: str | None) -> StoredVersion:
    stored = skill.find(version)
    if stored is None:
        raise version_not_found(str(version))
    return stored
