"""Inline: skills that requests bring with them. There is no store of skills."""

import asyncio
import base64
import binascii
from collections.abc import Sequence

from apis.errors import InvalidRequest, Unsupported
from apis.provider import Provider
from apis.skills.bundle import SkillBundle
from apis.skills.skills import Skills
from apis.wire.tools import InlineSkill, SkillSource
from providers.skills.bundle import MAX_BUNDLE_BYTES, MAX_FILES, InvalidBundle, read_bundle


class Inline(Skills):
    """Reads the archives of requests, each time from the request itself."""

    class Config(Provider.Config):
        """It has no settings."""

    def __init__(self, config: Config) -> None:
        pass

    async def load(self, sources: Sequence[SkillSource], *, tenant: str) -> Sequence[SkillBundle]:
        bundles: dict[str, SkillBundle] = {}
        available_bytes, available_files = MAX_BUNDLE_BYTES, MAX_FILES
        for index, source in enumerate(sources):
            param = f"skills[{index}]"
            if not isinstance(source, InlineSkill):
                message = "Skills are not stored by this server: send an 'inline' skill."
                raise Unsupported(message, param=param, code="unsupported_value")
            bundle = await asyncio.to_thread(_read_inline, source, f"{param}.source.data")
            if bundle.name != source.name:
                message = f"The archive is the skill '{bundle.name}', as its SKILL.md says, not '{source.name:.64}'."
                raise InvalidRequest(message, param=f"{param}.name", code="invalid_value")
            if bundle.name in bundles:
                message = f"Two skills are named '{bundle.name}'."
                raise InvalidRequest(message, param=f"{param}.name", code="invalid_value")
            available_bytes -= sum(len(file.data) for file in bundle.files)
            available_files -= len(bundle.files)
            if available_bytes < 0 or available_files < 0:
                message = f"All skills together have {MAX_FILES} files and {MAX_BUNDLE_BYTES >> 20} MiB at most."
                raise InvalidRequest(message, param=param, code="invalid_value")
            bundles[bundle.name] = SkillBundle(bundle.name, source.description, bundle.files)
        return list(bundles.values())


def _read_inline(skill: InlineSkill, param: str) -> SkillBundle:
    try:
        data = base64.b64decode(skill.source.data, validate=True)
        return read_bundle(data)
    except binascii.Error:
        raise InvalidRequest("The archive is not base64.", param=param, code="invalid_value") from None
    except InvalidBundle as exc:
        raise InvalidRequest(str(exc), param=param, code="invalid_value") from exc
