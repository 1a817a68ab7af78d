"""Tokens that no one may be admitted with, each by a name that says what is wrong with it."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from tests.support.servers.issuer import AUDIENCE, KIDS, Issuer, encode, jwk, private_key, sign

Forge = Callable[[Issuer], bytes]
Named = Iterator[tuple[str, Forge]]
ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")
OWN_KEYS: Final = ("rsa", "ec", "ed")
NO_LIST: Final[list[Any]] = []
NO_OBJECT: Final[dict[str, Any]] = {}
NO_TEXTS: Final[tuple[Any, ...]] = (None, 5, True, 0, {}, [], [5], [None], [["alpha"]], {"a": 1})


def with_claims(**changes: Any) -> Forge:
    return lambda issuer: issuer.token(issuer.claims(**changes))


def with_times(**offsets_s: int) -> Forge:
    """A token with times that are so many seconds from the moment at which it is forged."""
    return lambda issuer: issuer.token(
        issuer.claims(**{name: int(time.time()) + offset_s for name, offset_s in offsets_s.items()})
    )


def with_head(key: Any = None, **head: Any) -> Forge:
    return lambda issuer: issuer.token(key=key, **head)


def with_text(name: str, text: str) -> Forge:
    """A token whose claim is this JSON text."""
    return lambda issuer: issuer.token(json.dumps(issuer.claims(**{name: "@"})).replace('"@"', text).encode())


def with_body(change: Callable[[bytes], bytes]) -> Forge:
    return lambda issuer: issuer.token(change(json.dumps(issuer.claims()).encode()))


def with_head_bytes(head: bytes) -> Forge:
    return lambda issuer: issuer.signed(head, issuer.claims(), "RS256", "rsa")


def with_parts(change: Callable[[bytes, bytes, bytes], bytes], algorithm: str = "RS256") -> Forge:
    """A token made of the three parts of a good one."""
    return lambda issuer: change(*issuer.token(algorithm=algorithm).split(b"."))


def with_signature(change: Callable[[bytes], bytes], algorithm: str) -> Forge:
    return with_parts(lambda head, body, signature: joined(head, body, change(signature)), algorithm)


def joined(*parts: bytes) -> bytes:
    return b".".join(parts)


def with_public_key_as_secret(algorithm: str, form: str) -> Forge:
    def forge(issuer: Issuer) -> bytes:
        public, formats = private_key("rsa").public_key(), serialization.PublicFormat
        encodings = {
            "PEM": (serialization.Encoding.PEM, formats.SubjectPublicKeyInfo),
            "PKCS1 PEM": (serialization.Encoding.PEM, formats.PKCS1),
            "DER": (serialization.Encoding.DER, formats.SubjectPublicKeyInfo),
        }
        texts = {"JWK": json.dumps(jwk("rsa")), "modulus": jwk("rsa")["n"], "nothing": ""}
        secret = public.public_bytes(*encodings[form]) if form in encodings else texts[form].encode()
        return issuer.token(algorithm=algorithm, key=secret)

    return forge


def algorithms() -> Named:
    for name in ("none", "None", "NONE", "nOnE"):
        head = encode(b'{"alg":"%s"}' % name.encode())
        yield f"unsigned as {name}", with_parts(lambda _, body, __, unsigned=head: joined(unsigned, body, b""))
        yield f"{name} with a signature", with_head(alg=name)
    for form in ("PEM", "PKCS1 PEM", "DER", "JWK", "modulus", "nothing"):
        for algorithm in ("HS256", "HS384", "HS512"):
            yield f"{algorithm} by the public key as {form}", with_public_key_as_secret(algorithm, form)
    for algorithm in ALGORITHMS:
        for kid in OWN_KEYS:
            if kid != KIDS[algorithm]:
                yield f"{algorithm} under the id of {kid}", lambda i, a=algorithm, k=kid: i.token(algorithm=a, kid=k)
        for called in ALGORITHMS:
            if called != algorithm:
                for kid in (KIDS[algorithm], KIDS[called]):
                    yield (
                        f"{algorithm} called {called} under the id of {kid}",
                        lambda i, a=algorithm, c=called, k=kid: i.token(algorithm=a, alg=c, kid=k),
                    )
    for algorithm in ("RS384", "RS512", "PS384", "PS512"):
        yield f"{algorithm}, which is not listed", lambda i, a=algorithm: i.token(algorithm=a)
    for algorithm in ("ES384", "ES512", "ES256K"):
        yield f"{algorithm}, which is not listed", lambda i, a=algorithm: i.token(algorithm=a, key=a)
    for value in (
        "RSA1_5",
        "dir",
        "A128KW",
        "HS1",
        "",
        "rs256",
        "RS256 ",
        "RS256\x00",
        None,
        5,
        NO_LIST,
        ["RS256"],
        NO_OBJECT,
    ):
        yield f"the algorithm {value!r}", with_head(alg=value)
    yield "no algorithm", with_head(alg=...)


def signatures() -> Named:
    for algorithm in ALGORITHMS:
        changes: dict[str, Callable[[bytes], bytes]] = {
            "a short signature": lambda s: s[:-4],
            "a long signature": lambda s: s + b"AAAA",
            "a signature that begins wrong": lambda s: (b"B" if s[:1] == b"A" else b"A") + s[1:],
            "zeros": lambda s: b"A" * len(s),
            "one byte": lambda s: b"AA",
        }
        for name, change in changes.items():
            yield f"{name} as {algorithm}", with_signature(change, algorithm)
        stranger = f"{KIDS[algorithm]}-other"
        yield f"{algorithm} by another key", lambda i, a=algorithm, k=stranger: i.token(algorithm=a, key=k)
        yield f"{algorithm} of other claims", lambda i, a=algorithm: sign_other_claims(i, a)
    yield "a DER signature", sign_as_der


def sign_other_claims(issuer: Issuer, algorithm: str) -> bytes:
    head, _, signature = issuer.token(algorithm=algorithm).split(b".")
    return joined(head, encode(json.dumps(issuer.claims(team="beta")).encode()), signature)


def sign_as_der(issuer: Issuer) -> bytes:
    head, body, _ = issuer.token(algorithm="ES256").split(b".")
    raw = sign("ES256", private_key("ec"), joined(head, body))
    return joined(head, body, encode(encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))))


def claims() -> Named:
    for value in (..., None, "https://evil.example", "", 5, NO_OBJECT, ["x"]):
        yield f"the issuer {value!r}", with_claims(iss=value)
    yield "the issuer in a list", lambda issuer: issuer.token(issuer.claims(iss=[issuer.url]))
    for text in ("{}/", "{}x", "x{}", "{}\n", "{}.evil.example", "{}\x00"):
        yield (
            f"the issuer with {text!r}",
            lambda issuer, t=text: issuer.token(issuer.claims(iss=t.format(issuer.url))),
        )
    for value in ("other", "", "stac", "stack ", "STACK", "*", ["other"], [[AUDIENCE]], [AUDIENCE, 5], ..., *NO_TEXTS):
        yield f"the audience {value!r}", with_claims(aud=value)
    for value in (..., None, 0, -1, 2**60, True, NO_LIST, NO_OBJECT, "2000000000", [2000000000]):
        yield f"the expiry {value!r}", with_claims(exp=value)
    for offset_s in (-1, -1000, 10**6):
        yield f"the expiry {offset_s} s from now", with_times(exp=offset_s)
    for name in ("exp", "nbf"):
        for text in ("1e999", "NaN", "Infinity", "-Infinity", "9" * 5000, "1e1000000"):
            yield f"{name} {text[:10]}", with_text(name, text)
    for name in ("nbf", "iat"):
        for value in ("1700000000", True, NO_LIST, NO_OBJECT, -5):
            yield f"{name} {value!r}", with_claims(**{name: value})
        for offset_s in (60, 10**6):
            yield f"{name} {offset_s} s from now", with_times(**{name: offset_s})
    for value in (..., "", "a" * 256, ["ada"], *NO_TEXTS):
        yield f"the subject {value!r:.20}", with_claims(sub=value)
    yield "a token bound to a key", with_claims(cnf={"jkt": "x"})
    yield "a number as its id", with_claims(jti=5)


def with_end(issuer: Issuer, place: int, end: bytes) -> bytes:
    parts = issuer.token().split(b".")
    parts[place] += end
    return joined(*parts)


def structures() -> Named:
    for text in (b"", b".", b"..", b"...", b"a.b", b"a.b.c", b"e30.e30.e30", b"\x00", b"\xff.\xff.\xff", b"null"):
        yield f"{text!r}", lambda _, t=text: t
    yield "two parts", with_parts(lambda head, body, _: joined(head, body))
    yield "four parts", with_parts(lambda head, body, signature: joined(head, body, signature, b"e30"))
    yield "five parts", with_parts(lambda head, body, signature: joined(head, body, signature, b"e30", b"e30"))
    for place in range(3):
        for name, end in {"padding": b"=", "a line": b"\n", "a space": b" ", "other signs": b"+///"}.items():
            yield f"{name} after part {place}", lambda i, p=place, e=end: with_end(i, p, e)
    for body in (b"[]", b"5", b"null", b'"x"', b"", b"{", b"{}x", b"\xff", b"{'a': 1}"):
        yield f"the claims {body!r}", with_body(lambda _, b=body: b)
        yield f"the head {body!r}", with_head_bytes(body)
    yield "claims in UTF-16", with_body(lambda body: body.decode().encode("utf-16"))
    yield "claims with a byte order mark", with_body(lambda body: b"\xef\xbb\xbf" + body)
    for claim in (b'"sub":"eve"', b'"aud":"stack"', b'"iss":1', b'"exp":1', b'"team":"beta"', b'"realm":{}'):
        yield f"twice {claim.decode()}", with_body(lambda body, c=claim: b"{" + c + b"," + body[1:])
    yield "names twice deep within", with_text("x", '{"a": [{"b": 1, "b": 2}]}')
    yield "a head with two algorithms", with_head_bytes(b'{"alg":"RS256","kid":"rsa","alg":"RS256"}')
    for name, text in {"lists": "[" * 5000 + "]" * 5000, "objects": '{"a":' * 1500 + "1" + "}" * 1500}.items():
        yield f"deep {name}", with_text("x", text)
        yield f"a deep head of {name}", with_head_bytes(b'{"alg":"RS256","kid":"rsa","x":%s}' % text.encode())
    yield "too long", with_claims(x="x" * 17_000)
    yield "much too long", with_claims(x="x" * 60_000)
    yield "a number of 5000 digits", with_text("x", "9" * 5000)


def heads() -> Named:
    for kid in (
        5,
        True,
        NO_LIST,
        NO_OBJECT,
        ["rsa"],
        "",
        "RSA",
        "rsa ",
        "x" * 257,
        "../../../dev/null",
        "' OR 1=1 --",
        "\x00",
    ):
        yield f"the key id {kid!r:.20}", with_head(kid=kid)
    for head in ({"crit": ["exp"], "exp": 1}, {"crit": NO_LIST}, {"crit": ["b64"], "b64": True}, {"b64": False}):
        yield f"the head {head}", with_head(**head)
    yield "a compressed body", with_head(zip="DEF")
    for token_type in ("logout+jwt", "secevent+jwt", "dpop+jwt", "JWE", "", 5, NO_LIST, None):
        yield f"the type {token_type!r}", with_head(typ=token_type)
    for kid in ("evil", "rsa", ...):
        yield f"its own key, id {kid}", lambda i, k=kid: i.token(key="rsa-other", kid=k, jwk=jwk("rsa-other", "evil"))
        for name in ("jku", "x5u"):
            yield (
                f"{name} of its own keys, id {kid}",
                lambda issuer, n=name, k=kid: issuer.token(key="rsa-other", kid=k, **{n: f"{issuer.url}/evil"}),
            )
        yield f"its own certificate, id {kid}", with_head(key="rsa-other", kid=kid, x5c=["MIIB"], x5t="AAAA")
    yield "the URL of a key as its id", lambda issuer: issuer.token(key="rsa-other", kid=f"{issuer.url}/evil")


def rights() -> Named:
    unsafe = (
        ".admin",
        ".",
        "..",
        "a/b",
        "/a",
        "a b",
        "",
        " alpha",
        "alpha\n",
        "alpha\x00",
        "a" * 65,
        "a:b",
        "*",
        "a\\b",
    )
    foreign = ("ålpha", "\u0430lpha", "alpha\u200b", "%2eadmin", "\u2024admin")
    for team in (*unsafe, *foreign, ..., ["alpha", "beta"], ["alpha", 5], [".admin"], *NO_TEXTS):
        yield f"the team {team!r:.30}", with_claims(team=team)
    yield "a team with half a character", with_text("team", '"\\ud800"')
    texts = ("", "Engineer", "engineer ", "engineers", "admin", "guest engineer")
    lists = (["admin"], ["guest"], ["engineer", 5], [["engineer"]], ["engineer"] * 1001, ["guest", None])
    for roles in (*texts, *lists, {"engineer": True}, *NO_TEXTS):
        yield f"the roles {roles!r:.30}", with_claims(realm={"roles": roles})
    for realm in (..., None, NO_OBJECT, "engineer", ["engineer"], [{"roles": ["engineer"]}], 5):
        yield f"the realm {realm!r:.30}", with_claims(realm=realm)


FORGED: Final[dict[str, Forge]] = {
    name: forge for kind in (algorithms, signatures, claims, structures, heads, rights) for name, forge in kind()
}
