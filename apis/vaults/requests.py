"""The requests about vaults and their credentials."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from apis.agents.agents import AgentListParams
from apis.wire.base import Metadata, Wire

_MAX_NAME_BYTES: Final = 256
_MAX_SECRET_CHARS: Final = 16_384


def _check_name(name: str) -> str:
    if not 1 <= len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES:
        raise ValueError(f"must have 1 to {_MAX_NAME_BYTES} bytes without the blanks at its ends")
    return name


Name = Annotated[str, StringConstraints(strip_whitespace=True), AfterValidator(_check_name)]
Token = Annotated[str, Field(max_length=_MAX_SECRET_CHARS, pattern=r"^[\x21-\x7e]+$")]
"""A secret that a header carries."""
ClientSecret = Annotated[str, Field(min_length=1, max_length=_MAX_SECRET_CHARS)]
ServerUrl = Annotated[str, Field(min_length=1, max_length=2048)]
ExpiresAt = Annotated[str, Field(max_length=64)]
"""A time of RFC 3339."""
Scope = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[\x20-\x7e]+$")]


class NoClientSecret(Wire):
    type: Literal["none"]


class NewClientSecret(Wire):
    type: Literal["client_secret_basic", "client_secret_post"]
    client_secret: ClientSecret = Field(repr=False)


class NewRefresh(Wire):
    """How a new access token is requested when the present one expires."""

    client_id: str = Field(min_length=1, max_length=2048)
    refresh_token: Token = Field(repr=False)
    token_endpoint: ServerUrl
    token_endpoint_auth: Annotated[NoClientSecret | NewClientSecret, Field(discriminator="type")]
    resource: str | None = Field(None, min_length=1, max_length=2048)
    scope: Scope | None = None


class NewOAuth(Wire):
    """Tokens of OAuth for an MCP server."""

    type: Literal["mcp_oauth"]
    mcp_server_url: ServerUrl
    access_token: Token = Field(repr=False)
    expires_at: ExpiresAt | None = None
    refresh: NewRefresh | None = None


class NewBearer(Wire):
    """A token for an MCP server."""

    type: Literal["static_bearer"]
    mcp_server_url: ServerUrl
    token: Token = Field(repr=False)


class AnyHost(Wire):
    """Each host that the network of a container names."""

    type: Literal["unrestricted"]


class LimitedHosts(Wire):
    type: Literal["limited"]
    allowed_hosts: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(min_length=1, max_length=16)


class NewVariable(Wire):
    """A secret for programs in containers, which know a placeholder of it."""

    type: Literal["environment_variable"]
    secret_name: str = Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    secret_value: str = Field(max_length=_MAX_SECRET_CHARS, repr=False)
    networking: Annotated[AnyHost | LimitedHosts, Field(discriminator="type")]


NewAuth = Annotated[NewOAuth | NewBearer | NewVariable, Field(discriminator="type")]


class RotatedClientSecret(Wire):
    type: Literal["client_secret_basic", "client_secret_post"]
    client_secret: ClientSecret | None = Field(None, repr=False)


class RotatedRefresh(Wire):
    refresh_token: Token | None = Field(None, repr=False)
    scope: Scope | None = None
    token_endpoint_auth: RotatedClientSecret | None = None


class RotatedOAuth(Wire):
    """New tokens; what is absent stays. A new access token without a time does not expire."""

    type: Literal["mcp_oauth"]
    access_token: Token | None = Field(None, repr=False)
    expires_at: ExpiresAt | None = None
    refresh: RotatedRefresh | None = None


class RotatedBearer(Wire):
    type: Literal["static_bearer"]
    token: Token = Field(repr=False)


class RotatedVariable(Wire):
    type: Literal["environment_variable"]
    secret_value: str = Field(max_length=_MAX_SECRET_CHARS, repr=False)


RotatedAuth = Annotated[RotatedOAuth | RotatedBearer | RotatedVariable, Field(discriminator="type")]


class CreateVault(Wire):
    """Body that creates a vault."""

    name: Name | None = None
    metadata: Metadata | None = None


class UpdateVault(Wire):
    """Body that changes a vault: a field that is absent stays, and null removes the name."""

    name: Name | None = None
    metadata: Metadata | None = None


class CreateCredential(Wire):
    """Body that creates a credential."""

    name: Name
    auth: NewAuth
    metadata: Metadata | None = None


class UpdateCredential(Wire):
    """Body that changes a credential, whose type, server and hosts stay."""

    auth: RotatedAuth | None = None
    metadata: Metadata | None = None


Status = Literal["active", "archived"]


class VaultListParams(AgentListParams):
    """Query of a listing of vaults. Nothing is archived here: all that is stored is active."""

    status: Status | Annotated[list[Status], Field(max_length=2)] = "active"
    metadata: Metadata | None = None

    def accepts(self, metadata: Mapping[str, str]) -> bool:
        """Return True for an object that is listed."""
        pairs: Mapping[str, Any] = self.metadata or {}
        statuses = [self.status] if isinstance(self.status, str) else self.status
        return "active" in statuses and pairs.items() <= metadata.items()
