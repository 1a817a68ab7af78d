"""/v1/skills: folders of instructions and scripts, in numbered versions, for the containers of the shell."""

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.skills.bundle import SkillFile
from apis.skills.skills import CreateSkillVersion, Skills, UpdateSkill
from apis.wire.base import ListParams
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.forms import FormFields, open_form, read_form_fields
from stack.http.request_body import read_model
from stack.http.route import FILES, Route
from stack.http.routes.calls import ApiCalls

_DOWNLOAD_HEADERS: Final = {"content-disposition": 'attachment; filename="skill.zip"'}


async def create_skill(http: Request, context: HttpContext, services: Services) -> Response:
    skills = _require_skills(services)
    files, _ = await _read_files(http, context, services)
    return value_response(await skills.create(files, tenant=context.tenant))


async def update_skill(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateSkill)
    skill = await _require_skills(services).set_default(
        http.path_params["skill_id"], request.default_version, tenant=context.tenant
    )
    return value_response(skill)


async def get_skill_content(http: Request, context: HttpContext, services: Services) -> Response:
    archive = await _require_skills(services).read_archive(
        http.path_params["skill_id"], http.path_params.get("version"), tenant=context.tenant
    )
    return Response(archive, headers=_DOWNLOAD_HEADERS, media_type="application/zip")


async def create_skill_version(http: Request, context: HttpContext, services: Services) -> Response:
    skills = _require_skills(services)
    files, fields = await _read_files(http, context, services)
    request = read_form_fields(fields, CreateSkillVersion)
    version = await skills.create_version(
        http.path_params["skill_id"], files, is_default=request.default, tenant=context.tenant
    )
    return value_response(version)


async def delete_skill_version(http: Request, context: HttpContext, services: Services) -> Response:
    skill_id, version = http.path_params["skill_id"], http.path_params["version"]
    deleted = await _require_skills(services).delete_version(skill_id, version, tenant=context.tenant)
    fields = {"id": deleted.id, "object": "skill.version.deleted", "deleted": True, "version": deleted.version}
    return value_response(fields)


def _require_skills(services: Services) -> Skills:
    return require_section(services.stack.skills, "keeps no skills", "skills")


_skills = ApiCalls(_require_skills)
list_skills = _skills.calling("list_skills", lambda skills: skills.list)
get_skill = _skills.calling("get_skill", lambda skills: skills.get)
delete_skill = _skills.deleting("delete_skill", lambda skills: skills.delete, "skill.deleted")
list_skill_versions = _skills.calling("list_skill_versions", lambda skills: skills.list_versions)
get_skill_version = _skills.calling("get_skill_version", lambda skills: skills.get_version)

SKILL_ROUTES: Final = (
    Route("POST", "/skills", FILES, create_skill, form=BaseModel, file_field="files", stores=True),
    Route("GET", "/skills", FILES, list_skills, query=ListParams),
    Route("GET", "/skills/{skill_id}", FILES, get_skill),
    Route("POST", "/skills/{skill_id}", FILES, update_skill, body=UpdateSkill, stores=True),
    Route("DELETE", "/skills/{skill_id}", FILES, delete_skill),
    Route("GET", "/skills/{skill_id}/content", FILES, get_skill_content),
    Route(
        "POST",
        "/skills/{skill_id}/versions",
        FILES,
        create_skill_version,
        form=CreateSkillVersion,
        file_field="files",
        stores=True,
    ),
    Route("GET", "/skills/{skill_id}/versions", FILES, list_skill_versions, query=ListParams),
    Route("GET", "/skills/{skill_id}/versions/{version}", FILES, get_skill_version),
    Route("DELETE", "/skills/{skill_id}/versions/{version}", FILES, delete_skill_version),
    Route("GET", "/skills/{skill_id}/versions/{version}/content", FILES, get_skill_content),
)


async def _read_files(
    http: Request, context: HttpContext, services: Services
) -> tuple[Sequence[SkillFile], FormFields]:
    """Return the files of the form, and its other fields. The files are counted as a body is: they are in memory."""
    skills = _require_skills(services)
    async with open_form(http, skills.max_bundle_bytes, skills.max_files + 1, field="files") as form:
        uploads = form.files["files"]
        size_bytes = sum(upload.size or 0 for upload in uploads)
        services.shares.add_bytes(context.places, size_bytes, context.tenant)
        return [SkillFile(upload.filename or "", await upload.read()) for upload in uploads], form.fields
