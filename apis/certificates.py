"""The certificates that connections to other servers trust, loaded once for each process."""

import functools
import os
import ssl
from typing import Literal


def trusted_certificates(protocol: Literal["http", "smtp"] = "http") -> ssl.SSLContext:
    """Return the context that trusts the certificates of the system, or those of SSL_CERT_FILE and SSL_CERT_DIR.

    It is shared by all providers and stacks of a process that speak this protocol, because loading takes 20 ms. Those
    of HTTP set its names (ALPN) in the context, for which a mail server may end the connection. Raises OSError.
    """
    return _load_context(protocol, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _load_context(protocol: str, cert_file: str | None, cert_dir: str | None) -> ssl.SSLContext:
    """Return a context of these certificates, which OpenSSL itself reads from the environment."""
    return ssl.create_default_context()
