"""A skill with its files, as the ZIP archive of one folder holds it (https://agentskills.io)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SkillFile:
    """File of a skill, by its path within the skill's folder."""

    path: str
    data: bytes
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class SkillBundle:
    """Skill with its files. `name` is the name of its folder; both texts come from its SKILL.md."""

    name: str
    description: str
    files: Sequence[SkillFile]
