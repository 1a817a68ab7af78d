"""Environments of sessions: containers of this server with a workspace, their files, and the templates of such."""

from typing import Annotated, Literal

from pydantic import Field

from apis.agents.agents import AgentListParams, Cursor
from apis.wire.base import ListParams, Order, Wire
from apis.wire.tools import Domain, DomainSecret, Id, SkillSource, VaultIds

MAX_FILES = 50
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
_Variable = Annotated[str, Field(max_length=32_768)]
TemplateName = Annotated[str, Field(min_length=1, max_length=256)] | None
_Package = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9@][\x21-\x7e]*$")]


class FileById(Wire):
    """A copy of an uploaded file."""

    type: Literal["file_id"]
    file_id: Id
    path: FilePath


class InlineFile(Wire):
    """A file whose bytes are sent with it, in base64."""

    type: Literal["inline"]
    data: str = Field(max_length=23 * 1024 * 1024, repr=False)
    path: FilePath


HostedFile = Annotated[FileById | InlineFile, Field(discriminator="type")]


class EnvironmentNetwork(Wire):
    """The hosts that programs may reach: none, those of `allowed_domains`, or with `enabled` all that the operator
    opens. `domain_secrets` is an extension: a program sees placeholders, in whose place the proxy puts the values."""

    access: Literal["enabled", "disabled", "restricted"]
    allowed_domains: list[Domain] | None = Field(None, max_length=100)
    domain_secrets: list[DomainSecret] | None = Field(None, max_length=100, repr=False)


class EnvironmentPackages(Wire):
    """Packages that are installed before the agent begins, by pip and npm."""

    npm: list[_Package] | None = Field(None, max_length=100)
    python: list[_Package] | None = Field(None, max_length=100)


class SetupCommand(Wire):
    """A shell command that runs before the agent begins. It is never shown."""

    command: str = Field(min_length=1, max_length=65_536, repr=False)
    cwd: FilePath | None = None


class HostedConfiguration(Wire):
    """The fields that environments and their templates share."""

    env: dict[str, _Variable] | None = Field(None, max_length=100, repr=False)
    files: list[HostedFile] | None = Field(None, max_length=MAX_FILES)
    network: EnvironmentNetwork | None = None
    packages: EnvironmentPackages | None = None
    setup_commands: list[SetupCommand] | None = Field(None, max_length=32, repr=False)
    skills: list[SkillSource] | None = Field(None, max_length=32)


class NoEnvironment(Wire):
    """No environment: the agent has no files and runs no commands."""

    type: Literal["none"]


class NewEnvironment(HostedConfiguration):
    """A new environment; the fields of a template count where it has none of its own."""

    type: Literal["openai_hosted"]
    environment_template_id: Id | None = None


class HostedEnvironment(NewEnvironment):
    """A new environment, or with `environment_id` one that was created before and has no session."""

    environment_id: Id | None = None


class CreateEnvironment(Wire):
    """Body that creates an environment before a session needs it. Its programs have the variables of these vaults."""

    environment: NewEnvironment
    vault_ids: VaultIds | None = None


class CreateTemplate(HostedConfiguration):
    """Body that creates a template of environments."""

    name: TemplateName = None


class UpdateTemplate(HostedConfiguration):
    """Body that changes a template: a field that is absent stays, and null clears it. Environments that were made of it
    stay as they are."""

    name: TemplateName = None


class CreateEnvironmentFile(Wire):
    """Body that puts a file into an environment."""

    type: Literal["file_id", "inline"]
    path: FilePath
    file_id: Id | None = None
    data: str | None = Field(None, max_length=23 * 1024 * 1024, repr=False)


class EnvironmentFileListParams(Wire):
    """Query of a listing of the files of an environment. `page` is the token of the page before."""

    path: FilePath | None = None
    page: str | None = Field(None, max_length=8192)
    limit: int = Field(20, ge=1, le=100)
    order: Order = "desc"


class ArtifactListParams(ListParams):
    """Query of a listing of artifacts. A limit out of bounds is refused."""

    environment_id: Cursor | None = None


class EnvironmentListParams(AgentListParams):
    """Query of a listing of environments."""

    type: Literal["openai_hosted"] | None = None
