"""An issuer of tokens on a loopback port, whose documents a test chooses and whose tokens it signs, right or wrong."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, hmac, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

AUDIENCE: Final = "stack"
DISCOVERY: Final = "/.well-known/openid-configuration"
_HASHES: Final = {"256": hashes.SHA256, "384": hashes.SHA384, "512": hashes.SHA512}
_CURVES: Final = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1, "ES256K": ec.SECP256K1}
KIDS: Final = {"RS256": "rsa", "PS256": "rsa", "ES256": "ec", "EdDSA": "ed"}
"""The key ids of the issuer's own keys by the algorithms that they serve."""


def encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def encode_number(number: int) -> str:
    return encode(number.to_bytes((number.bit_length() + 7) // 8)).decode()


@cache
def private_key(name: str) -> Any:
    """A key by a name that begins with its kind: `rsa`, `rsa1024`, `ec`, `ES384`, `ed`. One name is always one key."""
    kind = name.partition("-")[0]
    if kind.startswith("rsa"):
        return rsa.generate_private_key(65537, int(kind[3:] or 2048))
    if kind == "ed":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(_CURVES.get(kind, ec.SECP256R1)())


def sign(algorithm: str, key: Any, data: bytes) -> bytes:
    """The signature of an algorithm that the key can make; `HS*` takes bytes as its key."""
    kind, size = algorithm[:2], algorithm[2:5]
    if kind == "HS":
        mac = hmac.HMAC(key, _HASHES[size]())
        mac.update(data)
        return mac.finalize()
    if kind == "RS":
        return key.sign(data, padding.PKCS1v15(), _HASHES[size]())
    if kind == "PS":
        digest = _HASHES[size]()
        return key.sign(data, padding.PSS(padding.MGF1(digest), digest.digest_size), digest)
    if kind == "ES":
        length = (key.key_size + 7) // 8
        r, s = decode_dss_signature(key.sign(data, ec.ECDSA(_HASHES[size]())))
        return r.to_bytes(length) + s.to_bytes(length)
    return key.sign(data)


def jwk(name: str, kid: str | None = None, **more: Any) -> dict[str, Any]:
    """The public part of a key as a member of a JWKS."""
    numbers = private_key(name).public_key()
    fields: dict[str, Any]
    if isinstance(numbers, rsa.RSAPublicKey):
        public = numbers.public_numbers()
        fields = {"kty": "RSA", "n": encode_number(public.n), "e": encode_number(public.e)}
    elif isinstance(numbers, ec.EllipticCurvePublicKey):
        point, length = numbers.public_numbers(), (numbers.key_size + 7) // 8
        curve = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}.get(numbers.curve.name, "secp256k1")
        x, y = (encode(number.to_bytes(length)).decode() for number in (point.x, point.y))
        fields = {"kty": "EC", "crv": curve, "x": x, "y": y}
    else:
        raw = numbers.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        fields = {"kty": "OKP", "crv": "Ed25519", "x": encode(raw).decode()}
    return {**fields, "kid": name if kid is None else kid, **more}


@dataclass
class Answer:
    """An HTTP answer. `body` may be a document; `pause_s` is before each of its bytes."""

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    pause_s: float = 0


@dataclass
class Issuer:
    """`answers` are by path; one of another path is a 404. `requests` are the paths that were asked for."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    requests: list[str] = field(default_factory=list[str])

    @property
    def fetch_count(self) -> int:
        return self.requests.count("/jwks")

    def publish(self, *keys: Mapping[str, Any]) -> None:
        """Replace the JWKS by one of these keys."""
        self.answers["/jwks"] = Answer({"keys": [*keys]})

    def claims(self, **changes: Any) -> dict[str, Any]:
        """The claims of a good token, changed; a change to `...` leaves a claim out."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "iat": now,
            "nbf": now,
            "exp": now + 600,
            "team": "alpha",
            "realm": {"roles": ["engineer", "offline"]},
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not ...}

    def token(self, claims: Any = None, algorithm: str = "RS256", key: Any = None, **head: Any) -> bytes:
        """A signed token. `claims` and `head` may be bytes of any kind; `key` is one's name, or the key itself."""
        body = self.claims() if claims is None else claims
        own_key = KIDS.get(algorithm, "rsa") if key is None else key
        fields = {"alg": algorithm, "typ": "JWT", "kid": KIDS.get(algorithm, "rsa"), **head}
        fields = {name: value for name, value in fields.items() if value is not ...}
        return self.signed(json.dumps(fields).encode(), body, algorithm, own_key)

    def signed(self, head: bytes, claims: Any, algorithm: str, key: Any) -> bytes:
        """A token whose head is these bytes."""
        body = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
        signing_input = encode(head) + b"." + encode(body)
        used_key = private_key(key) if isinstance(key, str) else key
        return signing_input + b"." + encode(sign(algorithm, used_key, signing_input))


@asynccontextmanager
async def issuing() -> AsyncGenerator[Issuer]:
    """An issuer with three keys: `rsa`, `ec` and `ed`."""
    issuer = Issuer()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            issuer.requests.append(path)
            sent = issuer.answers.get(path, Answer(status=404))
            body = sent.body if isinstance(sent.body, bytes) else json.dumps(sent.body).encode()
            headers = "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
            writer.write(f"HTTP/1.1 {sent.status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode())
            for byte in body if sent.pause_s else b"":
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(sent.pause_s)
            if not sent.pause_s:
                writer.write(body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test ends
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    issuer.answers[DISCOVERY] = Answer({"issuer": issuer.url, "jwks_uri": f"{issuer.url}/jwks"})
    issuer.publish(*(jwk(name) for name in ("rsa", "ec", "ed")))
    try:
        yield issuer
    finally:
        server.close()


def oidc_section(issuer: str, **fields: Any) -> dict[str, Any]:
    """An accounts section whose teams are tenants, and whose engineers have all rights."""
    engineer = {"scopes": ["responses", "files", "read"]}
    return {
        "provider": "oidc",
        "issuer": issuer,
        "audience": AUDIENCE,
        "leeway_s": 0,
        "tenant": {"claim": "team"},
        "roles": {"claim": ["realm", "roles"], "values": {"engineer": engineer}},
        **fields,
    }
