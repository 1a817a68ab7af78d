"""From the configuration of an environment to its workspace: what is stored, what is visible, and what is run."""

import base64
import binascii
import shlex
from collections.abc import Sequence
from typing import Final

from apis.agents.environments import EnvironmentNetwork, FileById, HostedConfiguration, InlineFile
from apis.documents.files import Files
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.wire.tools import DomainSecret, NetworkAllowlist, NetworkPolicy, NoNetwork, SkillReference, SkillSource
from apis.workspaces import WORKSPACE_FOLDER, WorkspaceRequest, Workspaces, is_workspace_path
from providers.agents.environments.records import Json

FIELDS: Final = ("env", "files", "network", "packages", "setup_commands", "skills")
_RESERVED_FOLDERS: Final = (".codex", ".managed-agents")
_OUTPUTS: Final = f"{WORKSPACE_FOLDER}/outputs"


def dump_configuration(configuration: HostedConfiguration) -> Json:
    """Return the fields of a configuration that are set, to be stored: with all that is confidential."""
    return configuration.model_dump(mode="json", by_alias=True, exclude_none=True, include={*FIELDS})


def parse_configuration(spec: Json) -> HostedConfiguration:
    """Return the configuration of stored fields."""
    return HostedConfiguration.model_validate(spec)


def check_path(path: str, param: str) -> str:
    """Return the path of a file in a workspace. Raises InvalidRequest for any other."""
    first = path.removeprefix(f"{WORKSPACE_FOLDER}/").partition("/")[0]
    is_reserved = first in _RESERVED_FOLDERS or first.startswith(".managed-agents-") or path == _OUTPUTS
    if not is_workspace_path(path) or is_reserved:
        message = f"A file lies below {WORKSPACE_FOLDER}, and not where the environment keeps its own."
        raise InvalidRequest(message, param=param, code="invalid_value")
    return path


def decode_data(data: str, param: str, max_bytes: int) -> bytes:
    """Return the bytes of a file that was sent inline. Raises InvalidRequest."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("The data of a file is base64.", param=param, code="invalid_value") from None
    _check_size(len(decoded), param, max_bytes)
    return decoded


def _check_size(size: int, param: str, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidRequest(f"A file of an environment has at most {max_bytes >> 20} MiB.", param=param)


class SpecReader:
    """Checks configurations of environments, and reads what they refer to."""

    def __init__(self, workspaces: Workspaces, idle_minutes: int) -> None:
        self._workspaces = workspaces
        self._files = workspaces.files
        self._skills = workspaces.skills
        self._idle_minutes = idle_minutes

    async def prepare(self, configuration: HostedConfiguration, *, tenant: str) -> tuple[Json, Json]:
        """Return the fields to be stored, and those that are visible. Raises InvalidRequest, NotFound and Unsupported,
        with the field in the environment as `param`."""
        spec = dump_configuration(configuration)
        skills = await self._pin_skills(configuration.skills or (), tenant)
        spec["skills"] = [skill.model_dump(mode="json", exclude_none=True) for skill in skills]
        await self._workspaces.check(self.build_request("", configuration), tenant=tenant)
        bundles = await self._skills.load(skills, tenant=tenant)
        visible: Json = {
            **show_configuration(configuration),
            "type": "openai_hosted",
            "container_size": None,
            "files": await self._show_files(configuration.files or (), tenant),
            "skills": [
                _show_skill(skill, bundle.name, bundle.description)
                for skill, bundle in zip(skills, bundles, strict=True)
            ],
        }
        for index, command in enumerate(configuration.setup_commands or ()):
            if command.cwd is not None and not command.cwd.startswith("/"):
                raise InvalidRequest("The folder of a command is absolute.", param=f"setup_commands[{index}].cwd")
        return spec, visible

    def build_request(self, name: str, configuration: HostedConfiguration) -> WorkspaceRequest:
        """Return the request for the workspace of a configuration."""
        return WorkspaceRequest(
            name or "environment",
            self._idle_minutes,
            self._build_policy(configuration.network),
            configuration.skills or (),
            configuration.env or {},
        )

    def _build_policy(self, network: EnvironmentNetwork | None) -> NetworkPolicy:
        if network is None or network.access == "disabled":
            return NoNetwork(type="disabled")
        domains: Sequence[str] = network.allowed_domains or ()
        if network.access == "enabled":
            domains = self._workspaces.open_hosts()
            if not domains:
                raise Unsupported(
                    "This server opens no hosts: use the network access 'disabled', or name hosts in "
                    "`egress.allowed_hosts` of the run config's tool runtime.",
                    param="network.access",
                    code="unsupported_value",
                )
        secrets = [DomainSecret.model_validate(secret.model_dump()) for secret in network.domain_secrets or ()]
        return NetworkAllowlist(type="allowlist", allowed_domains=[*domains], domain_secrets=secrets or None)

    async def read_files(self, configuration: HostedConfiguration, *, tenant: str) -> Sequence[tuple[str, bytes]]:
        """Return the files of a configuration by their paths. Raises NotFound for one that was deleted meanwhile."""
        max_bytes = self._workspaces.max_file_bytes
        contents: list[tuple[str, bytes]] = []
        for index, file in enumerate(configuration.files or ()):
            if isinstance(file, InlineFile):
                contents.append((file.path, decode_data(file.data, f"files[{index}].data", max_bytes)))
            else:
                contents.append((file.path, await self.read_upload(file.file_id, f"files[{index}]", tenant=tenant)))
        return contents

    async def read_upload(self, file_id: str, param: str, *, tenant: str) -> bytes:
        """Return the bytes of an uploaded file. Raises NotFound and InvalidRequest."""
        await self._measure_upload(file_id, param, tenant)
        return await self._require_files(param).read(file_id, tenant=tenant)

    def _require_files(self, param: str) -> Files:
        if self._files is None:
            raise Unsupported("Files cannot be uploaded to this server.", param=param or "file_id")
        return self._files

    async def _measure_upload(self, file_id: str, param: str, tenant: str) -> int:
        try:
            size = (await self._require_files(param).get(file_id, tenant=tenant)).bytes
        except NotFound as exc:
            exc.param = f"{param}.file_id" if "[" in param else "file_id"
            raise
        _check_size(size, param, self._workspaces.max_file_bytes)
        return size

    async def _show_files(self, files: Sequence[FileById | InlineFile], tenant: str) -> list[Json]:
        visible: list[Json] = []
        paths: set[str] = set()
        for index, file in enumerate(files):
            param = f"files[{index}]"
            path = check_path(file.path, f"{param}.path")
            if path in paths:
                raise InvalidRequest("Another file has this path.", param=f"{param}.path", code="invalid_value")
            paths.add(path)
            fields: Json = {"id": f"envfile_{index}", "type": file.type, "path": path}
            if isinstance(file, InlineFile):
                size = len(decode_data(file.data, f"{param}.data", self._workspaces.max_file_bytes))
            else:
                fields["file_id"] = file.file_id
                size = await self._measure_upload(file.file_id, param, tenant)
            visible.append({**fields, "size_bytes": size})
        return visible

    async def _pin_skills(self, skills: Sequence[SkillSource], tenant: str) -> Sequence[SkillSource]:
        """Return the skills with the versions that they have now."""
        pinned: list[SkillSource] = []
        for index, skill in enumerate(skills):
            if isinstance(skill, SkillReference) and skill.version in (None, "latest"):
                try:
                    stored = await self._skills.get(skill.skill_id, tenant=tenant)
                except NotFound as exc:
                    exc.param = f"skills[{index}].skill_id"
                    raise
                version = stored.latest_version if skill.version else stored.default_version
                pinned.append(skill.model_copy(update={"version": version}))
            else:
                pinned.append(skill)
        return pinned


def show_network(network: EnvironmentNetwork | None) -> Json:
    """Return a network as the API shows it, without secrets."""
    domains = network.allowed_domains or [] if network is not None else []
    return {"access": "disabled" if network is None else network.access, "allowed_domains": domains}


def show_configuration(configuration: HostedConfiguration) -> Json:
    """Return a configuration as templates and automations show it, without what is confidential."""
    packages = configuration.packages
    return {
        "capability_directories": [],
        "desktop": None,
        "files": [_show_source(file) for file in configuration.files or ()],
        "network": show_network(configuration.network),
        "packages": {
            "npm": (packages and packages.npm) or [],
            "python": (packages and packages.python) or [],
            "system": [],
        },
        "plugins": [],
        "skills": [
            skill.model_dump(include={"type", "name", "description", "skill_id", "version"})
            for skill in configuration.skills or ()
        ],
    }


def _show_source(file: FileById | InlineFile) -> Json:
    if isinstance(file, FileById):
        return file.model_dump()
    return {"type": "inline", "path": file.path, "size_bytes": len(file.data) * 3 // 4 - file.data[-2:].count("=")}


def list_setup_commands(configuration: HostedConfiguration) -> Sequence[str]:
    """Return the commands that run before an agent begins, in their order."""
    commands: list[str] = []
    packages = configuration.packages
    if packages is not None and packages.python:
        commands.append(f"python3 -m pip install --quiet -- {shlex.join(packages.python)}")
    if packages is not None and packages.npm:
        commands.append(f"npm install --silent --prefix /mnt/tmp/npm -- {shlex.join(packages.npm)}")
    for each in configuration.setup_commands or ():
        folder = f"cd {shlex.quote(each.cwd)} && " if each.cwd is not None else ""
        commands.append(f"{folder}{each.command}")
    return commands


def _show_skill(skill: SkillSource, name: str, description: str) -> Json:
    fields: Json = {"type": skill.type, "name": name, "description": description}
    if isinstance(skill, SkillReference):
        return {**fields, "skill_id": skill.skill_id, "version": skill.version}
    return fields
