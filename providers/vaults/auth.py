"""From the `auth` of a request to the part of a credential that is visible and the part that is encrypted."""

import re
from datetime import UTC, datetime
from typing import Final
from urllib.parse import SplitResult, urlsplit

from apis.agents.tools import CONNECTOR_SCHEME
from apis.errors import InvalidRequest
from apis.vaults.requests import (
    LimitedHosts,
    NewAuth,
    NewClientSecret,
    NewOAuth,
    NewRefresh,
    NewVariable,
    RotatedAuth,
    RotatedBearer,
    RotatedOAuth,
    RotatedRefresh,
    RotatedVariable,
)
from providers.common.net.host_names import text_to_host
from providers.vaults.records import Json
from providers.vaults.sealing import Secrets

MIN_VARIABLE_CHARS: Final = 8
"""Shorter values could be in any answer by chance, where placeholders would replace them."""
_VARIABLE_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_RESERVED_NAME: Final = re.compile(r"CODEX_.*|.*_PROXY|PATH|HOME|TMPDIR|PYTHON.*|PIP_.*|LD_.*|.*_CA_BUNDLE|SSL_CERT_.*")
_URL_CHARS: Final = re.compile(r"[\x21-\x7e]+")
_PORTS: Final = {"http": 80, "https": 443}


def split_auth(auth: NewAuth, *, allow_http: bool) -> tuple[Json, Secrets]:
    """Return the visible and the secret fields of a new credential. Raises InvalidRequest."""
    if isinstance(auth, NewVariable):
        return _split_variable(auth)
    _check_url(auth.mcp_server_url, "auth.mcp_server_url", allow_http=allow_http, is_server=True)
    if not isinstance(auth, NewOAuth):
        return {"type": auth.type, "mcp_server_url": auth.mcp_server_url}, {"token": auth.token}
    visible: Json = {
        "type": auth.type,
        "mcp_server_url": auth.mcp_server_url,
        "expires_at": _check_time(auth.expires_at),
        "refresh": None,
    }
    secret_fields: Secrets = {"token": auth.access_token}
    if auth.refresh is not None:
        visible["refresh"], more = _split_refresh(auth.refresh, allow_http=allow_http)
        secret_fields |= more
    return visible, secret_fields


def _split_refresh(refresh: NewRefresh, *, allow_http: bool) -> tuple[Json, Secrets]:
    _check_url(refresh.token_endpoint, "auth.refresh.token_endpoint", allow_http=allow_http)
    secret_fields: Secrets = {"refresh_token": refresh.refresh_token}
    if isinstance(refresh.token_endpoint_auth, NewClientSecret):
        secret_fields["client_secret"] = refresh.token_endpoint_auth.client_secret
    visible = {name: getattr(refresh, name) for name in ("client_id", "token_endpoint", "resource", "scope")}
    return {**visible, "token_endpoint_auth": {"type": refresh.token_endpoint_auth.type}}, secret_fields


def _split_variable(auth: NewVariable) -> tuple[Json, Secrets]:
    if _RESERVED_NAME.fullmatch(auth.secret_name.upper()):
        raise _wrong("auth.secret_name", "This variable is one of the containers' own: choose another name.")
    _check_variable(auth.secret_value)
    networking: Json = {"type": "unrestricted"}
    if isinstance(auth.networking, LimitedHosts):
        networking = {"type": "limited", "allowed_hosts": _read_hosts(auth.networking.allowed_hosts)}
    visible = {"type": auth.type, "secret_name": auth.secret_name, "networking": networking}
    return visible, {"value": auth.secret_value}


def rotate_auth(auth: RotatedAuth, visible: Json, secret_fields: Secrets) -> tuple[Json, Secrets]:
    """Return the fields of a credential with those of the request in their place. Raises InvalidRequest for fields of
    another type of credential."""
    if auth.type != visible["type"]:
        raise _wrong("auth.type", f"The credential is of the type '{visible['type']}', which stays.")
    match auth:
        case RotatedBearer():
            return visible, {"token": auth.token}
        case RotatedVariable():
            _check_variable(auth.secret_value)
            return visible, {"value": auth.secret_value}
        case RotatedOAuth():
            return _rotate_oauth(auth, visible, secret_fields)


def _rotate_oauth(auth: RotatedOAuth, visible: Json, secret_fields: Secrets) -> tuple[Json, Secrets]:
    visible, secret_fields = {**visible}, {**secret_fields}
    if auth.access_token is not None:
        secret_fields["token"], visible["expires_at"] = auth.access_token, None
    if "expires_at" in auth.model_fields_set:
        visible["expires_at"] = _check_time(auth.expires_at)
    if auth.refresh is not None:
        if visible["refresh"] is None:
            raise _wrong("auth.refresh", "The credential was created without `refresh`: create another one.")
        visible["refresh"] = _rotate_refresh(auth.refresh, visible["refresh"], secret_fields)
    return visible, secret_fields


def _rotate_refresh(refresh: RotatedRefresh, visible: Json, secret_fields: Secrets) -> Json:
    """Return the visible fields of the refresh; the secret ones are set."""
    if refresh.refresh_token is not None:
        secret_fields["refresh_token"] = refresh.refresh_token
    if "scope" in refresh.model_fields_set:
        visible = {**visible, "scope": refresh.scope}
    endpoint_auth = refresh.token_endpoint_auth
    if endpoint_auth is not None:
        if endpoint_auth.type != visible["token_endpoint_auth"]["type"]:
            raise _wrong("auth.refresh.token_endpoint_auth.type", "The type stays as it was created.")
        if endpoint_auth.client_secret is not None:
            secret_fields["client_secret"] = endpoint_auth.client_secret
    return visible


def normalize_url(url: str) -> str:
    """Return the spelling by which URLs of servers are compared: without a default port and a slash at the end."""
    if url.startswith(CONNECTOR_SCHEME):
        return url
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port not in (None, _PORTS.get(parts.scheme)) else ""
    except ValueError:
        return url
    host = (parts.hostname or "").rstrip(".")
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}{query}"


def is_expired(visible: Json, now: float) -> bool:
    """Return True if the access token of a credential has expired at that time."""
    expires_at = visible.get("expires_at")
    return expires_at is not None and datetime.fromisoformat(expires_at).timestamp() <= now


def format_time(seconds: float) -> str:
    """Return a time in seconds of Unix time as RFC 3339 has it."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _check_time(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None or "T" not in text.upper():
            raise ValueError(text)
        return format_time(time.timestamp())
    except (ValueError, OverflowError):
        raise _wrong("auth.expires_at", "This is no time of RFC 3339, such as 2026-11-27T21:00:00Z.") from None


def _check_variable(value: str) -> None:
    if len(value) < MIN_VARIABLE_CHARS or not _VARIABLE_VALUE.fullmatch(value):
        message = f"A secret has at least {MIN_VARIABLE_CHARS} characters of printable ASCII, and no blank at its ends."
        raise _wrong("auth.secret_value", message)


def _read_hosts(texts: list[str]) -> list[str]:
    hosts: dict[str, None] = {}
    for index, text in enumerate(texts):
        param = f"auth.networking.allowed_hosts[{index}]"
        try:
            host = text_to_host(text)
        except ValueError:
            host = ":"
        if ":" in host:
            raise _wrong(param, "A host is a name such as api.example.com or an IPv4 address: no URL and no port.")
        if host in hosts:
            raise _wrong(param, "This host is there twice.")
        hosts[host] = None
    return [*hosts]


def _check_url(url: str, param: str, *, allow_http: bool, is_server: bool = False) -> None:
    if is_server and url.startswith(CONNECTOR_SCHEME) and url != CONNECTOR_SCHEME:
        return
    try:
        parts = urlsplit(url) if _URL_CHARS.fullmatch(url) else SplitResult("", "", "", "", "")
        is_complete = bool(parts.hostname and text_to_host(parts.hostname)) and parts.port != 0
    except ValueError:
        raise _wrong(param, "This is no URL of a server.") from None
    if not is_complete or "@" in parts.netloc or "#" in url or "\\" in url or parts.scheme not in _PORTS:
        raise _wrong(param, "This is no URL of a server: it begins with https://, without a user and a fragment.")
    if parts.scheme == "http" and not allow_http:
        raise _wrong(
            param,
            "A secret is sent by https:// only: the run config has no `vaults.allow_http`, which permits http://.",
        )


def _wrong(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
