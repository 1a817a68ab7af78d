"""The certificates that connections to other servers trust, loaded once for each process."""

import functools
import os
import ssl


def trusted_certificates() -> ssl.SSLContext:
    """Return the context that trusts the certificates of the system, or those of SSL_CERT_FILE and SSL_CERT_DIR.

    It is shared by all providers and stacks of a process, because loading takes 20 ms. Raises OSError.
    """
    return _load_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _load_context(cert_file: str | None, cert_dir: str | None) -> ssl.SSLContext:
    """Return a context of these certificates, which OpenSSL itself reads from the environment."""
    return ssl.create_default_context()
