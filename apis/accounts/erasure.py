"""ProjectErasure: the accounts' part of the deletion of a project with all it owns."""

from abc import ABC, abstractmethod
from typing import Final

TOMBSTONE_LIFE_S: Final = 24 * 3600
"""Seconds for which a deleted project is remembered, longer than a request of it can have gone on."""


class ProjectErasure(ABC):
    """Deletes the accounts of archived projects. Sums of usage and the audit log stay for their own time."""

    @abstractmethod
    async def delete_keys(self, project_id: str) -> int:
        """Delete all keys of the project with their references, and return the number of keys."""

    @abstractmethod
    async def end_project(self, project_id: str) -> None:
        """Delete the project itself, record that in the audit log and remember its id for TOMBSTONE_LIFE_S, in one
        atomic step. Raises NotFound, and InvalidRequest if it is not archived."""

    @abstractmethod
    async def list_ended(self) -> list[str]:
        """Return the ids of the projects that were deleted within TOMBSTONE_LIFE_S and have not been created again."""
