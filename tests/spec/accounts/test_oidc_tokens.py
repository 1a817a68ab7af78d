"""Tokens against the provider `oidc` itself: whom it admits, and how often it fetches the keys of the issuer."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from apis.accounts.accounts import ADMIN_TENANT, Caller
from apis.accounts.limits import RateLimit
from apis.errors import StoreUnavailable
from providers.accounts.oidc.provider import OpenIDAccounts
from providers.accounts.oidc.settings import OpenIDConfig
from providers.fetcher.safe import GuardedFetcher
from providers.kv_store.memory import Memory
from tests.support.servers.issuer import DISCOVERY, Answer, Issuer, issuing, jwk, oidc_section
from tests.support.tenants.forged_tokens import ALGORITHMS, FORGED

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def accounts_of(issuer: Issuer, **fields: Any) -> AsyncGenerator[OpenIDAccounts]:
    """The provider over a real fetcher and a store in memory; `fields` are of its section."""
    section = oidc_section(issuer.url, **fields)
    del section["provider"]
    fetcher, store = GuardedFetcher(GuardedFetcher.Config()), Memory(Memory.Config())
    accounts = OpenIDAccounts(OpenIDConfig.model_validate(section), store, fetcher)
    async with asyncio.timeout(20):
        for provider in (store, fetcher, accounts):
            await provider.start()
        try:
            yield accounts
        finally:
            for provider in (accounts, fetcher, store):
                await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def issuer() -> AsyncGenerator[Issuer]:
    async with issuing() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def accounts(issuer: Issuer) -> AsyncGenerator[OpenIDAccounts]:
    async with accounts_of(issuer) as running:
        yield running


HEADS_REFUSED_UNREAD: tuple[dict[str, Any], ...] = ({"typ": "logout+jwt"}, {"alg": "HS256"}, {"alg": "none"})


async def admitted(accounts: OpenIDAccounts, token: bytes) -> Caller:
    caller = await accounts.authenticate(token)
    assert caller is not None
    return caller


async def is_admitted(accounts: OpenIDAccounts, token: bytes) -> bool:
    """True if the keys could be fetched and the token is one of theirs."""
    try:
        return await accounts.authenticate(token) is not None
    except StoreUnavailable:
        return False


async def until_refused(accounts: OpenIDAccounts, token: bytes) -> None:
    """Wait until the token is refused; the keys are fetched in the meantime."""
    async with asyncio.timeout(5):
        while await accounts.authenticate(token) is not None:  # noqa: ASYNC110 - time itself is what passes
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_token_of_the_issuer_admits_to_the_tenant_of_its_claim(
    issuer: Issuer, accounts: OpenIDAccounts, algorithm: str
) -> None:
    claims = issuer.claims()
    caller = await admitted(accounts, issuer.token(claims, algorithm))
    assert (caller.tenant, caller.key_id, caller.expires_at) == ("alpha", "oidc:ada", claims["exp"])
    assert caller.grant.scopes == {"responses", "files", "read"}
    for changes in (
        {"aud": ["other", "stack"]},
        {"team": ["alpha"]},
        {"nbf": ...},
        {"iat": ...},
        {"exp": claims["exp"] + 0.5},
    ):
        assert (await admitted(accounts, issuer.token(issuer.claims(**changes), algorithm))).tenant == "alpha"
    for head in ({"typ": "at+jwt"}, {"typ": ...}, {"kid": ...}, {"typ": "application/at+jwt"}):
        assert (await admitted(accounts, issuer.token(algorithm=algorithm, **head))).tenant == "alpha"


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_token_admits_no_one(issuer: Issuer, accounts: OpenIDAccounts, name: str) -> None:
    issuer.answers["/evil"] = Answer({"keys": [jwk("rsa-other", "evil"), jwk("rsa-other", "rsa")]})
    before = issuer.fetch_count
    assert await accounts.authenticate(FORGED[name](issuer)) is None
    assert "/evil" not in issuer.requests
    assert issuer.fetch_count <= before + 1


async def test_two_hundred_forged_tokens_cause_one_fetch_and_no_flood_of_the_log(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    async with accounts_of(issuer) as accounts:
        await admitted(accounts, issuer.token())
        before, tokens = issuer.fetch_count, [issuer.token(kid=f"made-up-{number}") for number in range(200)]
        with caplog.at_level(logging.WARNING):
            answers = await asyncio.gather(*(accounts.authenticate(token) for token in tokens))
        assert set(answers) == {None}
        assert issuer.fetch_count <= before + 1
        assert len(caplog.records) == 1
        assert "made-up" not in caplog.text


async def test_a_token_of_another_issuer_and_one_that_is_refused_unread_cause_no_fetch(issuer: Issuer) -> None:
    async with accounts_of(issuer, min_fetch_interval_s=0.01) as accounts:
        await admitted(accounts, issuer.token())
        await asyncio.sleep(0.02)
        before = issuer.fetch_count
        claims = issuer.claims(iss="https://other.example")
        for token in (issuer.token(claims, kid="x"), *(issuer.token(kid="x", **head) for head in HEADS_REFUSED_UNREAD)):
            assert await accounts.authenticate(token) is None
        assert issuer.fetch_count == before
        assert await accounts.authenticate(issuer.token(kid="x")) is None
        assert issuer.fetch_count == before + 1


async def test_a_token_is_verified_once(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with accounts_of(issuer) as accounts:
        token = issuer.token()
        await admitted(accounts, token)
        monkeypatch.setattr("jwt.decode", None)
        for _ in range(100):
            await admitted(accounts, token)


async def test_tokens_in_memory_are_bounded(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.accounts.oidc.provider._MAX_TOKENS", 5)
    async with accounts_of(issuer) as accounts:
        for number in range(20):
            await admitted(accounts, issuer.token(issuer.claims(sub=f"user-{number}"), "EdDSA"))
        assert len(accounts._tokens) == 5  # pyright: ignore[reportPrivateUsage] - the bound is of memory


async def test_a_token_ends_at_its_expiry_and_after_the_leeway(issuer: Issuer) -> None:
    now = int(time.time())
    async with accounts_of(issuer) as exact, accounts_of(issuer, leeway_s=60) as lenient:
        token = issuer.token(issuer.claims(exp=now + 1))
        assert (await admitted(lenient, token)).expires_at == now + 61
        await until_refused(exact, token)
        assert time.time() >= now + 1
        assert await lenient.authenticate(token) is not None
        late = issuer.token(issuer.claims(exp=now - 61))
        early = issuer.token(issuer.claims(nbf=now + 70))
        assert [await lenient.authenticate(each) for each in (late, early)] == [None, None]
        assert await lenient.authenticate(issuer.token(issuer.claims(nbf=now + 50))) is not None


async def test_a_new_key_of_the_issuer_is_fetched_and_a_withdrawn_one_is_forgotten() -> None:
    async with issuing() as issuer, accounts_of(issuer, keys_max_age_s=0.05, min_fetch_interval_s=0.05) as accounts:
        old, new = issuer.token(), issuer.token(key="rsa-other", kid="rsa-other")
        await admitted(accounts, old)
        await asyncio.sleep(0.06)  # a fetch is allowed again
        issuer.publish(jwk("rsa"), jwk("rsa-other"))
        assert (await admitted(accounts, new)).tenant == "alpha"
        await admitted(accounts, old)
        issuer.publish(jwk("rsa-other"))
        await until_refused(accounts, old)
        await admitted(accounts, new)


async def test_old_keys_serve_for_a_bounded_time_while_the_issuer_is_down() -> None:
    times = {"keys_max_age_s": 0.05, "keys_max_stale_s": 0.4, "min_fetch_interval_s": 0.05}
    async with issuing() as issuer, accounts_of(issuer, **times) as accounts:
        token, begun_at = issuer.token(), time.monotonic()
        await admitted(accounts, token)
        issuer.answers.clear()
        with pytest.raises(StoreUnavailable):
            await until_refused(accounts, token)
        duration_s = time.monotonic() - begun_at
        assert duration_s > 0.35
        assert issuer.requests.count(DISCOVERY) <= 2 + duration_s / 0.05
        issuer.answers[DISCOVERY] = Answer({"issuer": issuer.url, "jwks_uri": f"{issuer.url}/jwks"})
        issuer.publish(jwk("rsa"))
        await asyncio.sleep(0.06)
        await admitted(accounts, token)


BAD_SETS: dict[str, Answer] = {
    "no answer at all": Answer(pause_s=3600, body=b"x"),
    "one byte at a time": Answer({"keys": []}, pause_s=0.1),
    "a page": Answer(b"<html>Sign in</html>"),
    "nothing": Answer(b""),
    "an error": Answer({"keys": []}, status=500),
    "a redirect": Answer(status=302, headers={"location": "/evil"}),
    "a list": Answer([]),
    "no list of keys": Answer({"keys": {}}),
    "a megabyte": Answer(b'{"keys": [' + b" " * 2**20 + b"]}"),
    "101 keys": Answer({"keys": [{}] * 101}),
    "deep lists": Answer(b'{"keys": ' + b"[" * 60_000),
    "not UTF-8": Answer(b'{"keys": ["\xff"]}'),
}


@pytest.mark.parametrize("name", BAD_SETS)
async def test_a_set_of_keys_that_is_none_replaces_nothing(name: str) -> None:
    times = {"keys_max_age_s": 0.01, "min_fetch_interval_s": 0.01, "fetch_timeout_s": 0.3}
    async with issuing() as issuer, accounts_of(issuer, **times) as accounts:
        token = issuer.token()
        while not await is_admitted(accounts, token):  # a busy machine may need more than the 0.3 s
            pass
        issuer.answers["/jwks"] = BAD_SETS[name]
        await asyncio.sleep(0.02)
        assert await accounts.authenticate(issuer.token(key="rsa-other", kid="evil")) is None
        await admitted(accounts, token)
        assert "/evil" not in issuer.requests


async def test_keys_that_may_sign_no_tokens_are_skipped() -> None:
    rsa, curve = jwk("rsa"), jwk("ec")
    keys: tuple[Any, ...] = (
        {"kty": "oct", "k": "AAAA", "kid": "rsa", "alg": "HS256"},
        {**rsa, "use": "enc"},
        {**rsa, "key_ops": ["encrypt"]},
        {**rsa, "key_ops": 5},
        {**rsa, "alg": "RS512"},
        {**rsa, "alg": "ES256"},
        {**rsa, "kid": 5},
        {**rsa, "n": 5},
        {**rsa, "n": "***"},
        {**rsa, "e": "AA"},
        {**rsa, "kty": "EC"},
        jwk("rsa1024", "rsa"),
        {**curve, "crv": "P-384"},
        {**curve, "crv": "secp256k1"},
        {**curve, "x": "AAAA"},
        {**jwk("ed"), "x": "AAAA"},
        {**jwk("ed"), "crv": "Ed448"},
        *(5, None, [], "rsa", {}),
    )
    async with issuing() as issuer:
        issuer.publish(*keys)
        async with accounts_of(issuer) as accounts:
            for algorithm in ALGORITHMS:
                assert await accounts.authenticate(issuer.token(algorithm=algorithm)) is None
            assert await accounts.authenticate(issuer.token(key="rsa1024")) is None


async def test_a_key_id_that_several_keys_have_is_none_unless_their_types_differ() -> None:
    async with issuing() as issuer:
        issuer.publish(jwk("rsa", "one"), jwk("ec", "one"), jwk("rsa-other", "two"), jwk("rsa", "two"))
        async with accounts_of(issuer) as accounts:
            await admitted(accounts, issuer.token(kid="one"))
            await admitted(accounts, issuer.token(algorithm="ES256", kid="one"))
            assert await accounts.authenticate(issuer.token(key="rsa-other", kid="two")) is None
            assert await accounts.authenticate(issuer.token(kid=...)) is None


@pytest.mark.parametrize("case", ["another issuer", "a private host", "no https", "no URI", "a list", "nothing"])
async def test_a_discovery_document_leads_nowhere_else(case: str, caplog: pytest.LogCaptureFixture) -> None:
    async with issuing() as issuer, issuing() as inner:
        uris = {
            "a private host": f"https://{inner.url.removeprefix('http://')}/jwks",
            "no https": f"{inner.url}/jwks",
            "no URI": None,
        }
        document: Any = {"issuer": issuer.url, "jwks_uri": uris.get(case, f"{issuer.url}/jwks")}
        if case == "another issuer":
            document["issuer"] = f"{issuer.url}/"
        documents: dict[str, Any] = {"a list": [], "nothing": b""}
        issuer.answers[DISCOVERY] = Answer(documents.get(case, document))
        async with accounts_of(issuer) as accounts:
            with pytest.raises(StoreUnavailable):
                await accounts.authenticate(issuer.token())
            assert inner.requests == []
            assert issuer.fetch_count == 0
            assert await accounts.authenticate(b"sk-of-someone-else") is None
    assert "cannot be fetched" in caplog.text


async def test_the_url_of_the_keys_may_be_in_the_run_config(issuer: Issuer) -> None:
    async with issuing() as other:
        async with accounts_of(issuer, jwks_url=f"{other.url}/jwks") as accounts:
            await admitted(accounts, issuer.token())
        assert other.requests == ["/jwks"]


async def test_roles_add_up_to_the_rights_of_one_key(issuer: Issuer) -> None:
    values: dict[str, Any] = {
        "reader": {"scopes": "read", "limits": {"max_requests_per_1_day": 9, "max_tokens_per_1_day": 50}},
        "research": {"scopes": ["model:small", "tool:web_search"], "limits": {"max_tokens_per_1_day": 70}},
        "root": {"scopes": ["admin"]},
    }
    rule = {"claim": "scope", "values": values}
    async with accounts_of(issuer, roles=rule, user_claim="email", key_prefix="corp") as accounts:

        async def rights(scope: Any, **claims: Any) -> Caller | None:
            fields = {"scope": scope, "email": "ada@example.com", **claims}
            return await accounts.authenticate(issuer.token(issuer.claims(**fields), "EdDSA"))

        reader = await rights("openid reader")
        assert reader is not None
        assert (reader.key_id, reader.grant.scopes, reader.grant.models) == ("corp:ada@example.com", {"read"}, None)
        assert reader.limits == {"key:corp:ada@example.com": RateLimit(day_requests=9, day_tokens=50)}
        both = await rights(["research", "reader"])
        assert both is not None
        assert (both.grant.scopes, both.grant.models, both.grant.tools) == ({"read"}, {"small"}, {"web_search"})
        assert both.limits == {"key:corp:ada@example.com": RateLimit(day_requests=9, day_tokens=50)}
        root = await rights("root", team=...)
        assert root is not None
        assert (root.tenant, root.grant.scopes, root.is_administrator) == (ADMIN_TENANT, {"admin"}, True)
        mixed = await rights("root reader")
        assert mixed is not None
        assert (mixed.tenant, mixed.grant.scopes) == ("alpha", {"admin", "read"})
        assert await rights("root reader", team=...) is None
        assert await rights("rootreader") is None
        for email in (..., None, 5, "", ["a", "b"]):
            assert await rights("reader", email=email) is None
        hashed = await rights("reader", email="Åda <ada@example.com>")
        assert hashed is not None
        assert hashed.key_id.startswith("corp-")
        assert len(hashed.key_id) == 37


async def test_the_tenant_is_the_first_value_that_the_claim_has_or_always_the_same(issuer: Issuer) -> None:
    values = {"Sales & Service": "sales", "/eng": "alpha"}
    rule = {"claim": ["org", "groups"], "values": values}
    async with accounts_of(issuer, tenant=rule) as mapped, accounts_of(issuer, tenant={"name": "one"}) as fixed:
        for groups, tenant in (
            ("/eng", "alpha"),
            (["/eng", "Sales & Service"], "sales"),
            (["x", "/eng"], "alpha"),
            (["x"], None),
            ("sales", None),
            ([], None),
        ):
            token = issuer.token(issuer.claims(org={"groups": groups}), "EdDSA")
            caller = await mapped.authenticate(token)
            assert (caller.tenant if caller else None) == tenant
            assert (await admitted(fixed, token)).tenant == "one"
