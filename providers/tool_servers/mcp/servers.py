"""Finds the MCP server that a declaration names: its URL or command, and the headers that it is sent."""

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

import httpx2
from mcp_types import INVALID_PARAMS
from openai.types.responses.mcp_tool_call_error import McpProtocolError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from apis.tool_servers import InvalidDeclaration, ServerPolicy
from apis.wire.tools import McpTool
from providers.common.secret_spellings import list_spellings
from providers.tool_servers.mcp.texts import one_line
from providers.tool_servers.mcp.wire import Transport

_URL: Final = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][!-\"$-~]*)?")
"""Excludes URLs that two parsers could read as two hosts, users and fragments."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]{0,8192}")
_RESERVED_HEADERS: Final = re.compile(
    r"accept|accept-encoding|connection|content-.*|expect|host|keep-alive|last-event-id|mcp-.*|proxy-.*|te|trailer"
    r"|transfer-encoding|upgrade"
)
_CREDENTIAL_NAME: Final = re.compile(r"auth|cookie|credential|key|pass|secret|session|signature|token", re.IGNORECASE)
_MIN_SECRET_CHARS: Final = 6
"""Shorter values are not redacted: that would destroy unrelated text."""
_LONG_VALUE_CHARS: Final = 16
"""Header values of this length are redacted even where their name is not a credential's."""
_MAX_HEADERS: Final = 64
_MAX_URL_CHARS: Final = 2048
_WRONG_URL: Final = "not a plain http or https URL"


def _validate_url(text: str) -> str:
    if len(text) > _MAX_URL_CHARS or not _URL.fullmatch(text):
        raise ValueError(_WRONG_URL)
    try:
        httpx2.URL(text)
    except httpx2.InvalidURL:
        raise ValueError(_WRONG_URL) from None
    return text


Url = Annotated[str, AfterValidator(_validate_url)]


class _ServerRules(BaseModel):
    """Limits of a server of the run config, in addition to those of a request: the `tenants` that may use it, the
    `allowed_tools`, and the tools whose calls need an approval. `private` permits a URL in a private network."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    private: bool = False
    tenants: list[str] | None = None
    allowed_tools: list[str] | None = None
    require_approval: Literal["always", "never"] | list[str] = "never"

    def permits(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants

    def to_policy(self) -> ServerPolicy:
        names = self.require_approval
        return ServerPolicy(
            None if self.allowed_tools is None else frozenset(self.allowed_tools),
            None if names == "always" else frozenset(() if names == "never" else names),
        )


class ConnectorConfig(_ServerRules):
    """A server that requests may name by a connector id, with credentials of their own."""

    url: Url


class McpServerConfig(_ServerRules):
    """A server that requests may name by its label: one at a URL, or a command that the stack starts, whose environment
    is `env` and a few harmless variables of the stack's own."""

    url: Url | None = None
    headers: dict[str, SecretStr] = Field(default_factory=dict[str, SecretStr])
    transport: Transport | Literal["stdio"] | None = None
    command: str | None = Field(None, min_length=1)
    args: list[str] = Field(default_factory=list[str])
    env: dict[str, SecretStr] = Field(default_factory=dict[str, SecretStr])

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("give either url or command")
        if self.command is not None and (self.headers or self.transport not in (None, "stdio")):
            raise ValueError("a command has no headers, and its transport is stdio")
        if self.command is not None and self.private:
            raise ValueError("a command has no network address that could be private")
        if self.url is not None and (self.args or self.env or self.transport == "stdio"):
            raise ValueError("a url has no args and no env, and its transport is not stdio")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value.get_secret_value()):
                raise ValueError("a header holds characters that no header has")
        return self


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server over HTTP. `headers` are lower-case and go to the origin of `url` only. One that `is_private` may have
    an address in a private network."""

    url: str
    transport: Transport
    headers: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    is_private: bool = False

    @property
    def identity(self) -> Hashable:
        """Equal for equal credentials at one server; shows no credential."""
        digest = hashlib.sha256(json.dumps(sorted(self.headers.items())).encode()).hexdigest()
        return (self.url, self.transport, digest, self.is_private)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that is a child process."""

    label: str
    command: str
    args: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)

    @property
    def identity(self) -> Hashable:
        return (self.label, "stdio")


McpServerTarget = RemoteServer | LocalServer


@dataclass(frozen=True, slots=True)
class ServerCatalog:
    """The run config's servers by label, its connectors by id, and the hosts that a request may name."""

    servers: Mapping[str, McpServerConfig]
    connectors: Mapping[str, ConnectorConfig]
    allowed_hosts: Sequence[str] | None

    def find_server(self, declaration: McpTool, tenant: str) -> McpServerTarget:
        """Return the declared server. Raises InvalidDeclaration where the tenant knows none or it is not allowed."""
        url, connector_id = declaration.server_url, declaration.connector_id
        if url is not None and connector_id is not None:
            raise _declaration_error("connector_id", "An MCP server has a `server_url` or a `connector_id`, not both.")
        if url is not None:
            _check_url(url)
        headers = _build_headers(declaration)
        if url is not None:
            self._check_host(url)
            return _build_remote(url, None, headers)
        if connector_id is None:
            return self._find_configured(declaration.server_label, headers, tenant)
        connector = self.connectors.get(connector_id)
        if connector is None or not connector.permits(tenant):
            raise _declaration_error(
                "connector_id", "There is no such connector here; the run config names those that there are."
            )
        return replace(_build_remote(connector.url, None, headers), is_private=connector.private)

    def known_labels(self, tenant: str) -> Sequence[str]:
        """Return the labels of the servers that the tenant may use."""
        return [label for label, server in self.servers.items() if server.permits(tenant)]

    def find_policy(self, declaration: McpTool) -> ServerPolicy:
        """Return the run config's limits of the declared server; a URL of the request has none."""
        if declaration.server_url is not None:
            return ServerPolicy()
        if declaration.connector_id is not None:
            rules = self.connectors.get(declaration.connector_id)
        else:
            rules = self.servers.get(declaration.server_label)
        return ServerPolicy() if rules is None else rules.to_policy()

    def _find_configured(self, label: str, headers: dict[str, str], tenant: str) -> McpServerTarget:
        config = self.servers.get(label)
        if config is None or not config.permits(tenant):
            raise _declaration_error(
                "server_url", "The MCP server has no server_url, and the run config knows none of that label."
            )
        if config.command is not None:
            if headers:
                raise _declaration_error(
                    "headers", "This MCP server is a local one, and takes no authorization and no headers."
                )
            env = {name: value.get_secret_value() for name, value in config.env.items()}
            return LocalServer(label, config.command, config.args, env, _select_secrets(env.values()))
        assert config.url is not None, "one kind"
        assert config.transport != "stdio", "one kind"
        own = {name.lower(): value.get_secret_value() for name, value in config.headers.items()}
        if fixed := own.keys() & headers.keys():
            raise _declaration_error(
                "headers", f"The run config sets the header '{min(fixed)}' of this MCP server: leave it out."
            )
        server = _build_remote(config.url, config.transport, {**own, **headers})
        return replace(server, secrets=_select_secrets([*server.secrets, *own.values()]), is_private=config.private)

    def _check_host(self, url: str) -> None:
        host = (urlsplit(url).hostname or "").rstrip(".")
        if self.allowed_hosts is not None and not any(
            host == allowed or host.endswith(f".{allowed}") for allowed in self.allowed_hosts
        ):
            raise _declaration_error(
                "server_url", "The host of the MCP server is not one of those that the run config allows."
            )


def _check_url(url: str) -> None:
    try:
        _validate_url(url)
    except ValueError as exc:
        raise _declaration_error("server_url", f"Wrong declaration of an MCP server: server_url: {exc}") from None


def _build_headers(declaration: McpTool) -> dict[str, str]:
    headers: dict[str, str] = {}
    declared = declaration.headers or {}
    if len(declared) > _MAX_HEADERS:
        raise _declaration_error(
            "headers",
            "Wrong declaration of an MCP server: headers: "
            f"Dictionary should have at most {_MAX_HEADERS} items after validation, not {len(declared)}",
        )
    for name, value in declared.items():
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name) or _RESERVED_HEADERS.fullmatch(lower) or lower in headers:
            raise _declaration_error("headers", f"The header '{one_line(name, 64)}' cannot be set for an MCP server.")
        headers[lower] = value
    if declaration.authorization is not None:
        if "authorization" in headers:
            raise _declaration_error(
                "authorization", "An MCP server gets either authorization or a header of that name."
            )
        scheme, _, token = declaration.authorization.partition(" ")
        bare = token if scheme.lower() == "bearer" else declaration.authorization
        headers["authorization"] = f"Bearer {bare}"
    if not all(_HEADER_VALUE.fullmatch(value) for value in headers.values()):
        raise _declaration_error(
            "headers", "The authorization or a header of the MCP server holds characters that no header has."
        )
    return headers


def _build_remote(url: str, transport: Transport | None, headers: Mapping[str, str]) -> RemoteServer:
    path = urlsplit(url).path.rstrip("/")
    secrets = [
        piece
        for name, value in headers.items()
        if _CREDENTIAL_NAME.search(name) or len(value) >= _LONG_VALUE_CHARS
        for piece in (value, value.partition(" ")[2])
    ]
    return RemoteServer(
        url, transport or ("sse" if path.endswith("/sse") else "streamable_http"), headers, _select_secrets(secrets)
    )


def _select_secrets(values: Iterable[str]) -> tuple[str, ...]:
    """Return the values to redact, also as other texts spell them, longest first: one may contain another."""
    secrets = {value for value in values if len(value) >= _MIN_SECRET_CHARS}
    for value in [each for each in secrets if each.isascii()]:
        secrets |= {spelling.decode() for spelling in list_spellings(value.encode())}
    return tuple(sorted(secrets, key=len, reverse=True))


def _declaration_error(field_name: str, message: str) -> InvalidDeclaration:
    return InvalidDeclaration(
        field_name, McpProtocolError(type="mcp_protocol_error", code=INVALID_PARAMS, message=message)
    )
