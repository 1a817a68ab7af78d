"""Where the page learns how people sign in: `console/sign_in.json` and the page's policy, both without a key."""

import asyncio
import logging
from typing import Any

import httpx2
import pytest

from providers.accounts.oidc.discovery import find_sign_in
from providers.accounts.oidc.settings import OpenIDConfig
from stack.http.routes.console.page import HEADERS
from tests.support.sdk.client import TLS
from tests.support.servers.issuer import AUDIENCE, DISCOVERY, Answer, Issuer, issuing, oidc_section
from tests.support.servers.serving import serving

POLICY = "content-security-policy"
PAGE = {"console": True}
RULE: dict[str, Any] = {"client_id": AUDIENCE}
ENDPOINTS = {
    "authorization_endpoint": "https://login.example.com/authorize?p=b2c",
    "token_endpoint": "https://tokens.example.com:8443/token",
}


def publish(issuer: Issuer, **fields: str) -> None:
    """Add fields to the issuer's discovery document."""
    document = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/jwks", "registration_endpoint": f"{issuer.url}/new"}
    issuer.answers[DISCOVERY] = Answer({**document, **fields})


def chained(issuer: Issuer, **fields: Any) -> dict[str, Any]:
    sections = {"config": {"provider": "config"}, "people": oidc_section(issuer.url, **fields)}
    return {"accounts": {"provider": "chain", "providers": sections}}


async def test_the_page_learns_the_sign_in_of_a_chain_and_nothing_else() -> None:
    async with issuing() as issuer:
        publish(issuer, **ENDPOINTS, end_session_endpoint="https://login.example.com/end")
        accounts = chained(issuer, sign_in={**RULE, "scopes": ["openid", "groups"]})
        async with (
            serving(more=accounts, server=PAGE) as served,
            httpx2.AsyncClient(base_url=served.url, verify=TLS) as client,
        ):
            answer = await client.get("/console/sign_in.json")
            assert answer.json() == {
                "issuer": issuer.url,
                **ENDPOINTS,
                "end_session_endpoint": "https://login.example.com/end",
                "client_id": AUDIENCE,
                "scopes": ["openid", "groups"],
                "token": "id_token",
            }
            assert (answer.headers["cache-control"], answer.headers["content-type"]) == ("no-cache", "application/json")
            assert (await client.post("/console/sign_in.json")).status_code == 405
            page = await client.get("/")
            directives = page.headers[POLICY].split("; ")
            assert "connect-src 'self' https://tokens.example.com:8443" in directives
            assert [each for each in directives if not each.startswith("connect-src")] == [
                each for each in HEADERS[POLICY].split("; ") if not each.startswith("connect-src")
            ]
            unchanged = {"if-none-match": page.headers["etag"]}
            assert (await client.get("/", headers=unchanged)).status_code == 304
            assert (await client.get("/console/main.js")).headers[POLICY] == HEADERS[POLICY]


async def test_without_a_client_id_the_page_is_as_it_was() -> None:
    async with issuing() as issuer:
        publish(issuer, **ENDPOINTS)
        async with (
            serving(more={"accounts": oidc_section(issuer.url)}, server=PAGE) as served,
            httpx2.AsyncClient(base_url=served.url, verify=TLS) as client,
        ):
            answer = await client.get("/console/sign_in.json")
            assert (answer.status_code, answer.json()) == (200, None)
            assert (await client.get("/")).headers[POLICY] == HEADERS[POLICY]


async def test_keys_from_a_jwks_url_and_endpoints_from_discovery_are_read_both() -> None:
    async with issuing() as issuer:
        publish(issuer, **ENDPOINTS)
        fields = {"jwks_url": f"{issuer.url}/jwks", "sign_in": {"client_id": "page", "token": "access_token"}}
        async with (
            serving(more={"accounts": oidc_section(issuer.url, **fields)}, server=PAGE) as served,
            httpx2.AsyncClient(base_url=served.url, verify=TLS) as client,
        ):
            answer = (await client.get("/console/sign_in.json")).json()
            assert (answer["token"], answer["client_id"]) == ("access_token", "page")
            assert answer["end_session_endpoint"] is None


async def test_an_issuer_that_is_down_leaves_the_page_and_its_keys(caplog: pytest.LogCaptureFixture) -> None:
    async with issuing() as issuer:
        issuer.answers[DISCOVERY] = Answer(status=500)
        accounts = chained(issuer, sign_in=RULE, min_fetch_interval_s=0.05)
        async with (
            serving(more=accounts, server={**PAGE, "api_keys": ["sk-1"]}) as served,
            httpx2.AsyncClient(base_url=served.url, verify=TLS) as client,
        ):
            answer = await client.get("/console/sign_in.json")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert (await client.get("/")).headers[POLICY] == HEADERS[POLICY]
            assert [model.id async for model in served.client.models.list()] == ["scripted"]
            with caplog.at_level(logging.WARNING):
                publish(issuer)  # it is back, and has no endpoints for a page
                await asyncio.sleep(0.05)
                answer = await client.get("/console/sign_in.json")
            assert answer.json() is None
            assert "the endpoints of sign_in" in caplog.text
            assert "authorization_endpoint" in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://tokens.example.com/token",
        "javascript:alert(1)//https://x",
        "https://user@tokens.example.com/token",
        "https://tokens.example.com; script-src */token",
        "https://tokens.example.com,x/token",
        "https://*/token",
        "https://tokens.example.com/token#here",
        "//tokens.example.com/token",
        "https://tokens.example.com/to ken",
        f"https://tokens.example.com/{'x' * 2048}",
        "",
        None,
        ["https://tokens.example.com/token"],
    ],
)
def test_endpoints_that_a_page_must_not_use_are_refused(url: object) -> None:
    section = oidc_section("https://login.example.com", sign_in=RULE)
    del section["provider"]
    config = OpenIDConfig.model_validate(section)
    assert config.sign_in is not None
    assert find_sign_in(ENDPOINTS, config, config.sign_in).token_origin == "https://tokens.example.com:8443"
    for name in (*ENDPOINTS, *(["end_session_endpoint"] if url else [])):
        with pytest.raises(ValueError, match=name):
            find_sign_in({**ENDPOINTS, name: url}, config, config.sign_in)
