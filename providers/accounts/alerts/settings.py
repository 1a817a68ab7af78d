"""The settings of the mail server: its address, how the connection is encrypted, and the sender."""

import ipaddress
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from apis.accounts.spend_alerts import EmailAddress

_PORTS: Final = {"smtp": 587, "smtps": 465}


@dataclass(frozen=True, slots=True)
class MailServer:
    """The address of a mail server and its account, without which none is used. `is_tls` is for a connection that
    begins with TLS, and `needs_starttls` for one that has to become encrypted before anything is sent."""

    host: str
    port: int
    is_tls: bool
    needs_starttls: bool
    username: str | None = None
    password: str | None = field(default=None, repr=False)


class EmailConfig(BaseModel):
    """`url` is `smtp://USER:PASSWORD@HOST:587`, which needs STARTTLS unless the host is this machine or `plain_text` is
    true, or `smtps://USER:PASSWORD@HOST:465`. `timeout_s` bounds the time of one e-mail, and `check_interval_s` is the
    time between two looks for alerts."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: SecretStr
    sender: EmailAddress
    plain_text: bool = False
    timeout_s: float = Field(default=30, gt=0, le=600)
    check_interval_s: float = Field(default=5, gt=0, le=3600)

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.find_server().is_tls and self.plain_text:
            raise ValueError("plain_text is for a url that begins with smtp://")
        return self

    def find_server(self) -> MailServer:
        """Return the parts of `url`. Raises ValueError, which does not contain it."""
        try:
            parts = urlsplit(self.url.get_secret_value())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = parts = None
        if parts is None or not host or parts.scheme not in _PORTS or parts.path not in ("", "/") or port == 0:
            raise ValueError("url must be smtp://USER:PASSWORD@HOST:PORT or smtps://USER:PASSWORD@HOST:PORT")
        if parts.query or parts.fragment:
            raise ValueError("url must have no '?' or '#': write %3F and %23 in the user or the password")
        username, password = (None if text is None else unquote(text) for text in (parts.username, parts.password))
        if (username is None) != (password is None):
            raise ValueError("url must have both a user and a password, or none")
        is_tls = parts.scheme == "smtps"
        needs_starttls = not (is_tls or self.plain_text or _is_loopback(host))
        return MailServer(host, port or _PORTS[parts.scheme], is_tls, needs_starttls, username, password)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
