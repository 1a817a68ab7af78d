"""The sections `server` and `decisions` of a run config: where and how to listen, who may call, how it decides."""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)


def _key_to_entry(value: object) -> object:
    return {"key": value} if isinstance(value, str) else value


class ApiKey(BaseModel):
    """A key that clients send as `Authorization: Bearer KEY`. What one tenant stores, no other sees. One with `admin`
    also manages the projects and keys of `accounts`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: SecretStr = Field(min_length=1)
    tenant: str = Field(default="default", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    admin: bool = False


class DecisionsConfig(BaseModel):
    """How decisions are made. With two `orders` each question is read twice, with its options in their order and in the
    reverse one, and the probabilities are averaged: models prefer some places of a list. `temperatures` has numbers by
    the names of models: above 1 the probabilities come closer to each other, below 1 they go apart."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    orders: int = Field(default=1, ge=1, le=2)
    temperatures: dict[str, Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]] = {}


class HttpServerConfig(BaseModel):
    """Where and how to listen. `keep_alive_s` is the longest silence on a stream before a comment line is sent, or on a
    WebSocket before a ping; a WebSocket that has been open for `max_websocket_age_s` is closed between responses;
    running requests have `grace_period_s` to finish after SIGTERM. A `*` among `allowed_hosts` allows any Host;
    loopback names are always allowed. Web pages of `cors_origins` may call the API from a browser. Bodies in progress
    hold at most `max_bodies_bytes` together, and uploads in the folder for temporary files `max_uploads_bytes`; of one
    address, which all clients of a proxy share, `max_silent_per_address` connections may be open on which no
    request has passed authentication; `max_streams` and `max_websockets` may be open, of which one tenant has at most
    half once a second one has come. In each process, models answer `max_running` requests of clients at once,
    `max_waiting` wait, each for `max_wait_s`, and the next one is refused with 503. `/metrics` requires `metrics_key`,
    or any API key if that is unset and there is one tenant (`keyed`), or no key (`open`), or does not exist (`closed`);
    with `access_log` each request logs a line, which shows a hash of its tenant, or the name if `access_log_tenants`
    is `named`. With `finish_stored_responses` a stored response goes on although its client disconnects. `console`
    serves the built-in page at `/`, which a server without keys does by default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8321, ge=0, le=65535)
    api_keys: list[Annotated[ApiKey, BeforeValidator(_key_to_entry)]] = []
    allowed_hosts: list[str] = []
    cors_origins: list[str] = []
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    max_bodies_bytes: int = Field(default=512 * 1024 * 1024, ge=1024 * 1024)
    max_uploads_bytes: int = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    max_connections: int = Field(default=8192, ge=1)
    max_silent_per_address: int = Field(default=5000, ge=1)
    max_streams: int = Field(default=4096, ge=1)
    max_running: int = Field(default=4096, ge=1)
    max_waiting: int = Field(default=1024, ge=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    max_websockets: int = Field(default=1024, ge=1)
    max_websocket_age_s: float = Field(default=3600, gt=0)
    finish_stored_responses: bool = False
    keep_alive_s: float = Field(default=15.0, gt=0)
    grace_period_s: float = Field(default=30.0, ge=0)
    dialect: Literal["openai", "open-responses"] = "openai"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    access_log: bool = False
    access_log_tenants: Literal["hashed", "named"] = "hashed"
    metrics: Literal["closed", "open", "keyed"] = "keyed"
    metrics_key: SecretStr | None = Field(default=None, min_length=1)
    console: bool | None = None
    dangerously_allow_unauthenticated: bool = False

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of the API keys; empty on a server without keys, which has one tenant."""
        return frozenset(entry.tenant for entry in self.api_keys)

    @field_validator("api_keys")
    @classmethod
    def _reject_duplicate_keys(cls, keys: list[ApiKey]) -> list[ApiKey]:
        if len({entry.key.get_secret_value() for entry in keys}) < len(keys):
            raise ValueError("holds the same key twice; give every tenant a key of its own.")
        return keys

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError("holds a text that is no origin: write scheme://host or scheme://host:port, or *.")
        return origins

    @model_validator(mode="after")
    def _fit_one_body(self) -> Self:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError("max_bodies_bytes is less than max_body_bytes: one body must fit.")
        return self
