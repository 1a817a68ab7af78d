"""Skills: stores and loads the skills of tenants."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from openai.types.skill import Skill
from openai.types.skills import SkillVersion
from pydantic import Field

from apis.provider import Provider
from apis.skills.bundle import SkillBundle, SkillFile
from apis.storage.pages import Page
from apis.wire.base import ListParams, Wire
from apis.wire.tools import SkillSource


class UpdateSkill(Wire):
    """Request to make another version of a skill its default."""

    default_version: str = Field(min_length=1, max_length=20)


class CreateSkillVersion(Wire):
    """The form fields, next to its files, of a new version of a skill."""

    default: bool = False


class Skills(Provider, ABC):
    """Skills of tenants. Bundles are hostile: their count and size of files, their paths and links are checked.

    A skill has numbered versions, which never change and whose numbers are not used again. Its name and description are
    those of its default version. A tenant's id is unknown to every other tenant. The files of a new skill or version
    are one ZIP archive, or the files of one folder by their paths; InvalidRequest has the param `files`.
    """

    max_bundle_bytes: int
    """Maximum size of a skill, as an archive and as the sum of its files."""
    max_files: int
    """Maximum number of a skill's files."""

    @abstractmethod
    async def load(self, sources: Sequence[SkillSource], *, tenant: str) -> Sequence[SkillBundle]:
        """Return the skills that a request brings or refers to.

        Raise InvalidRequest or NotFound, whose `param` is the place in the list, such as `skills[1].source.data`; also
        for two skills of one name, and for more bytes than a container may hold.
        """

    @abstractmethod
    async def create(self, files: Sequence[SkillFile], *, tenant: str) -> Skill:
        """Store a skill, whose version 1 these files are. Raise InvalidRequest, also for a tenant with too many."""

    @abstractmethod
    async def list(self, params: ListParams, *, tenant: str) -> Page[Skill]:
        """Return the tenant's skills by their creation time. The id of a deleted skill is still valid as `after`."""

    @abstractmethod
    async def get(self, skill_id: str, *, tenant: str) -> Skill:
        """Return the skill. Raise NotFound."""

    @abstractmethod
    async def set_default(self, skill_id: str, version: str, *, tenant: str) -> Skill:
        """Make the version the skill's default. Raise NotFound, and InvalidRequest for a version it does not have."""

    @abstractmethod
    async def delete(self, skill_id: str, *, tenant: str) -> None:
        """Delete the skill with all its versions. Raise NotFound."""

    @abstractmethod
    async def create_version(
        self, skill_id: str, files: Sequence[SkillFile], *, is_default: bool, tenant: str
    ) -> SkillVersion:
        """Store the next version of the skill. Raise NotFound and InvalidRequest."""

    @abstractmethod
    async def list_versions(self, skill_id: str, params: ListParams, *, tenant: str) -> Page[SkillVersion]:
        """Return the versions by their numbers. Raise NotFound, and InvalidRequest for an unknown `after`."""

    @abstractmethod
    async def get_version(self, skill_id: str, version: str, *, tenant: str) -> SkillVersion:
        """Return the version of this number, or the highest for `latest`. Raise NotFound."""

    @abstractmethod
    async def delete_version(self, skill_id: str, version: str, *, tenant: str) -> SkillVersion:
        """Delete a version and return what it was. The skill ends with its only version. Raise NotFound, and
        InvalidRequest for the default of several."""

    @abstractmethod
    async def read_archive(self, skill_id: str, version: str | None, *, tenant: str) -> bytes:
        """Return the ZIP archive of a version, of the default one for None. Raise NotFound."""
