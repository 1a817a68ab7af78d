"""Records of stored skills, and the objects of the API that they stand for.

TENANT/skill/SKILL                    the skill with its versions
TENANT/skill_archive/SKILL/VERSION    the ZIP archive of a version
TENANT/skill_count                    the number of the tenant's skills
"""

import re
from typing import Final

import msgspec
from openai.types.skill import Skill
from openai.types.skills import SkillVersion

from apis.errors import NotFound

LATEST: Final = "latest"
_SKILL_ID: Final = re.compile(r"skill_[0-9a-f]{44}")


class StoredVersion(msgspec.Struct):
    """A version of a skill; `created_at` is in seconds since the epoch."""

    number: int
    id: str
    created_at: int
    name: str
    description: str

    def to_wire(self, skill_id: str) -> SkillVersion:
        return SkillVersion(
            id=self.id,
            created_at=self.created_at,
            description=self.description,
            name=self.name,
            object="skill.version",
            skill_id=skill_id,
            version=str(self.number),
        )


class StoredSkill(msgspec.Struct):
    """A skill and its versions in the order of their numbers, at least one. `next_number` is above all that it had."""

    created_at: int
    default_number: int
    next_number: int
    versions: list[StoredVersion]

    @property
    def default(self) -> StoredVersion:
        return next(version for version in self.versions if version.number == self.default_number)

    def find(self, version: str | None) -> StoredVersion | None:
        """Return the version of this number, the highest for `latest`, and the default for None."""
        if version is None:
            return self.default
        if version == LATEST:
            return self.versions[-1]
        return next((each for each in self.versions if str(each.number) == version), None)

    def to_wire(self, skill_id: str) -> Skill:
        return Skill(
            id=skill_id,
            created_at=self.created_at,
            default_version=str(self.default_number),
            description=self.default.description,
            latest_version=str(self.versions[-1].number),
            name=self.default.name,
            object="skill",
        )


def is_skill_id(text: str) -> bool:
    """Return True if a skill may have this id."""
    return _SKILL_ID.fullmatch(text) is not None


def archive_prefix(tenant: str, skill_id: str) -> str:
    """Return the prefix of the keys of a skill's archives."""
    return f"{tenant}/skill_archive/{skill_id}/"


def archive_key(tenant: str, skill_id: str, number: int) -> str:
    """Return the key of a version's archive."""
    return f"{archive_prefix(tenant, skill_id)}{number:09d}"


def skill_not_found(skill_id: str) -> NotFound:
    """Return the error for an id that the tenant has no skill of."""
    return NotFound(f"Skill with id '{skill_id:.64}' not found.", param="skill_id")


def version_not_found(version: str) -> NotFound:
    """Return the error for a version that a skill does not have."""
    return NotFound(f"The skill has no version '{version:.20}'.", param="version")
