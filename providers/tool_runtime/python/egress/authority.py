"""Certificates of one container: an authority of its own, whose key never leaves the proxy.

Imported with the first secret, because its library takes 50 ms.
"""

import ssl
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from providers.common.net.host_names import is_address
from providers.common.processes.process import open_memory_file

_VALID_FOR: Final = timedelta(days=3650)
_CLOCK_SKEW: Final = timedelta(days=1)


class ContainerAuthority:
    """Signs certificates for the hosts whose TLS the proxy ends."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "proxy of this container")])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        self._certificate = (
            _begin_certificate(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, in PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def build_server_context(self, host: str) -> ssl.SSLContext:
        """Return the context of a server that is trusted as this host. Blocks for a millisecond."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.IPAddress(ip_address(host)) if is_address(host) else x509.DNSName(host)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _begin_certificate(x509.Name([]), self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private_key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        pem = private_key + certificate.public_bytes(serialization.Encoding.PEM)
        with open_memory_file("certificate", pem) as file:  # the library wants a path, and no disk gets the key
            context.load_cert_chain(f"/proc/self/fd/{file}")
        context.sni_callback = partial(_check_name, host)
        return context


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
    )


def _check_name(host: str, _connection: object, name: str | None, _context: object) -> int | None:
    """End a handshake that asks for another host. One for an address has no name."""
    is_right = name.lower() == host if name is not None else is_address(host)
    return None if is_right else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
