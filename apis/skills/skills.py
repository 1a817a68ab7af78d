"""Skills: loads the skills of tenants."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from apis.provider import Provider
from apis.skills.bundle import SkillBundle
from apis.wire.tools import SkillSource


class Skills(Provider, ABC):
    """Skills of tenants. Bundles are hostile: their count and size of files, their paths and links are checked."""

    @abstractmethod
    async def load(self, sources: Sequence[SkillSource], *, tenant: str) -> Sequence[SkillBundle]:
        """Return the skills that a request brings or refers to.

        Raise InvalidRequest, NotFound or Unsupported, whose `param` is the place in the list, such as
        `skills[1].source.data`; also for two skills of one name, and for more bytes than a container may hold.
        """
