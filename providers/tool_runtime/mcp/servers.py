"""Which MCP server a declaration means: where it is, what it is sent, and which of its tools may be used."""

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

import httpx2
from mcp_types import INVALID_PARAMS
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from apis.errors import ToolFailed
from providers.tool_runtime.mcp.texts import one_line, protocol_error
from providers.tool_runtime.mcp.wire import Transport

_URL: Final = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][!-\"$-~]*)?")
"""Nothing that two parsers could read as two hosts; no user, no fragment."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]{0,8192}")
_RESERVED_HEADERS: Final = re.compile(
    r"accept|accept-encoding|connection|content-.*|expect|host|keep-alive|last-event-id|mcp-.*|proxy-.*|te|trailer"
    r"|transfer-encoding|upgrade"
)
_CREDENTIAL_NAME: Final = re.compile(r"auth|cookie|credential|key|pass|secret|session|signature|token", re.IGNORECASE)
_MIN_SECRET_CHARS: Final = 6
_LONG_VALUE_CHARS: Final = 16


def _validate_url(text: str) -> str:
    if len(text) > 2048 or not _URL.fullmatch(text):
        raise ValueError("not a plain http or https URL")
    try:
        httpx2.URL(text)
    except httpx2.InvalidURL:
        raise ValueError("not a plain http or https URL") from None
    return text


Url = Annotated[str, AfterValidator(_validate_url)]


class McpServerConfig(BaseModel):
    """A server that requests may name by its label: one at a URL, or a command that is started here. A command's
    environment is a few harmless variables of ours and `env`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

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
        if self.url is not None and (self.args or self.env or self.transport == "stdio"):
            raise ValueError("a url has no args and no env, and its transport is not stdio")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value.get_secret_value()):
                raise ValueError("a header holds characters that no header has")
        return self


class _ToolFilter(BaseModel):
    model_config = ConfigDict(strict=True)

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ServerDeclaration(BaseModel):
    """What a request's tool says. Nothing here can name a command."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    server_label: str = Field(min_length=1, max_length=256)
    server_url: Url | None = None
    connector_id: str | None = None
    authorization: str | None = Field(None, repr=False)
    headers: dict[str, str] | None = Field(None, repr=False, max_length=64)
    allowed_tools: list[str] | _ToolFilter | None = None
    transport: Transport | None = None
    pinned: list[dict[str, Any]] | None = None

    def permits_tool(self, tool: Mapping[str, Any]) -> bool:
        """Whether `allowed_tools` lets it be listed and called."""
        allowed = self.tool_filter
        read_only = tool["annotations"].get("readOnlyHint", False)
        return (allowed.tool_names is None or tool["name"] in allowed.tool_names) and (
            allowed.read_only is None or allowed.read_only == read_only
        )

    @property
    def tool_filter(self) -> _ToolFilter:
        if isinstance(self.allowed_tools, list):
            return _ToolFilter(tool_names=self.allowed_tools)
        return self.allowed_tools or _ToolFilter()


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server over HTTP. `headers` are lower-case and go to the origin of `url` only."""

    url: str
    transport: Transport
    headers: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)

    @property
    def identity(self) -> Hashable:
        """Of the server together with whose credentials it is used with, without showing them."""
        digest = hashlib.sha256(json.dumps(sorted(self.headers.items())).encode()).hexdigest()
        return (self.url, self.transport, digest)


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
    """What the run config knows: servers by label, URLs by connector id, and the hosts that a request may name."""

    servers: Mapping[str, McpServerConfig]
    connectors: Mapping[str, str]
    allowed_hosts: Sequence[str] | None

    def find_server(self, declaration: ServerDeclaration) -> McpServerTarget:
        """Raises ToolFailed for what is not known or not allowed."""
        headers = _build_headers(declaration)
        match declaration.server_url, declaration.connector_id:
            case str() as url, None:
                self._check_host(url)
                return _build_remote(url, declaration.transport, headers)
            case None, str() as connector:
                if connector not in self.connectors:
                    raise _declaration_error(
                        "connector_id", "There is no such connector here; the run config names those that there are."
                    )
                return _build_remote(self.connectors[connector], declaration.transport, headers)
            case None, None:
                return self._find_configured(declaration.server_label, headers)
            case _:
                raise _declaration_error("connector_id", "An MCP server has a server_url or a connector_id, not both.")

    def _find_configured(self, label: str, headers: dict[str, str]) -> McpServerTarget:
        known = self.servers.get(label)
        if known is None:
            raise _declaration_error(
                "server_url", "The MCP server has no server_url, and the run config knows none of that label."
            )
        if known.command is not None:
            if headers:
                raise _declaration_error(
                    "headers", "This MCP server is a local one, and takes no authorization and no headers."
                )
            env = {name: value.get_secret_value() for name, value in known.env.items()}
            return LocalServer(label, known.command, known.args, env, _select_secrets(env.values()))
        assert known.url is not None, "one kind"
        assert known.transport != "stdio", "one kind"
        own = {name.lower(): value.get_secret_value() for name, value in known.headers.items()}
        server = _build_remote(known.url, known.transport, {**own, **headers})
        return RemoteServer(
            server.url, server.transport, server.headers, _select_secrets([*server.secrets, *own.values()])
        )

    def _check_host(self, url: str) -> None:
        host = (urlsplit(url).hostname or "").rstrip(".")
        if self.allowed_hosts is not None and not any(
            host == allowed or host.endswith(f".{allowed}") for allowed in self.allowed_hosts
        ):
            raise _declaration_error(
                "server_url", "The host of the MCP server is not one of those that the run config allows."
            )


def parse_declaration(options: Mapping[str, Any]) -> ServerDeclaration:
    """Raises ToolFailed; what it says holds no value of the declaration."""
    try:
        return ServerDeclaration.model_validate(options.get("server"))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        raise _declaration_error(path, f"Wrong declaration of an MCP server: {path}: {why}") from None


def _build_headers(declaration: ServerDeclaration) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in (declaration.headers or {}).items():
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
    """What is to be blotted out. The short is not: it would blot out what has nothing to do with it."""
    return tuple(sorted({value for value in values if len(value) >= _MIN_SECRET_CHARS}, key=len, reverse=True))


def _declaration_error(field_name: str, message: str) -> ToolFailed:
    failure = protocol_error(INVALID_PARAMS, message)
    return ToolFailed(failure.message, detail={**(failure.detail or {}), "param": field_name})
