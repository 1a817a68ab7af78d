"""SignIn: how people get a key in their browser, from an identity provider (OpenID Connect)."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class SignIn:
    """The authorization code flow of a public client with PKCE (RFC 6749, RFC 7636). Nothing in it is a secret.

    Every URL is absolute, begins with https:// (http:// where the operator allows it), and has no characters that mean
    something in a Content-Security-Policy. `token` is the one of the issuer's two tokens that is the key.
    """

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    end_session_endpoint: str | None
    client_id: str
    scopes: tuple[str, ...]
    token: Literal["id_token", "access_token"]

    @property
    def token_origin(self) -> str:
        """The origin of the token endpoint, to which a browser sends the code."""
        parts = urlsplit(self.token_endpoint)
        return f"{parts.scheme}://{parts.netloc}"
