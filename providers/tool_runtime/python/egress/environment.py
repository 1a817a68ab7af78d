"""Environment of programs that may leave their container: variables of proxies and of certificates."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROXY_PORT: Final = 3128
"""Port on the loopback of each sandbox, whose network is its own."""
CERTIFICATES_FILE: Final = "/etc/ssl/certs/ca-certificates.crt"
_PACKAGES_FOLDER: Final = "/mnt/tmp/packages"
_PROXY_URL: Final = f"http://127.0.0.1:{PROXY_PORT}"
_PROXIED: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NOT_PROXIED: Final = "localhost,127.0.0.1,::1"
_CERTIFICATE_VARIABLES: Final = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "GIT_SSL_CAINFO"),
    *("AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT", "npm_config_cafile"),
)
NETWORK_VARIABLES: Final[Mapping[str, str]] = {
    **dict.fromkeys((*_PROXIED, *map(str.lower, _PROXIED)), _PROXY_URL),
    "NO_PROXY": _NOT_PROXIED,
    "no_proxy": _NOT_PROXIED,
    "NODE_USE_ENV_PROXY": "1",
    **dict.fromkeys(_CERTIFICATE_VARIABLES, CERTIFICATES_FILE),
    "PIP_TARGET": _PACKAGES_FOLDER,
    "PYTHONPATH": _PACKAGES_FOLDER,
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "npm_config_update_notifier": "false",
}
"""Variables of every container with a network. Packages of pip go where programs may write and Python looks."""


def build_environment(placeholders: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with those that stand for secrets."""
    return {**NETWORK_VARIABLES, **placeholders}


def read_system_certificates() -> bytes:
    """Return the certificates that this machine trusts, in PEM: those of SSL_CERT_FILE or SSL_CERT_DIR, or the
    system's. Blocks. Raises OSError."""
    paths = ssl.get_default_verify_paths()
    file, folder = (Path(path or "") for path in (paths.cafile, paths.capath))
    files = [file] if file.is_file() else sorted(folder.glob("????????.[0-9]"))
    return b"".join(each.read_bytes() for each in files)


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """Needs of a guest that may reach a proxy: a `descriptor` by which it hands its listening socket out, the
    certificates that its programs trust, in PEM, and their further environment."""

    descriptor: int
    certificates: bytes
    environment: Mapping[str, str]
