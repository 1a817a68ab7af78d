"""Sign-in from the page in Chromium, at an identity provider in a process of its own that demands PKCE."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Page, Request, expect

from stack.config import load_config
from tests.console.conftest import OpenPage
from tests.console.test_accessibility import look, settle, window_of
from tests.spec.accounts.test_team_recipe import CONFIG, program
from tests.support.servers.ports import free_port
from tests.support.servers.practice_provider import pages_provider, practice_provider
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import stored_organization

pytestmark = pytest.mark.console
PEOPLE: Final = ({"sub": "ada", "team": "red", "role": "member"}, {"sub": "eve", "team": "red", "role": "none"})
CLIENT: Final = "console"
API: Final = "https://api.example.com"
OLD_KEY: Final = "sk-old"
CHANGE_PENDING: Final = """
(field) => {
  const pending = JSON.parse(sessionStorage["stack.sign_in"]);
  sessionStorage["stack.sign_in"] = JSON.stringify({ ...pending, [field]: "x".repeat(43) });
}
"""


def accounts(issuer: str, **fields: Any) -> dict[str, Any]:
    people = {
        "provider": "oidc",
        "issuer": issuer,
        "audience": [CLIENT, API],
        "leeway_s": 0,
        "tenant": {"claim": "team"},
        "roles": {"claim": "role", "values": {"member": {"scopes": ["responses", "files", "read"]}}},
        "sign_in": {"client_id": CLIENT, **fields},
    }
    return {
        "accounts": {"provider": "chain", "providers": {"keys": {"provider": "config"}, "people": people}},
        "server": {"console": True, "api_keys": [{"key": OLD_KEY, "tenant": "red"}]},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_issuer() -> AsyncGenerator[str]:
    """An issuer without options, at which the person of every window signs in again."""
    async with pages_provider(*PEOPLE) as issuer:
        yield issuer


@asynccontextmanager
async def signing_in(
    open_page: OpenPage,
    path: str = "",
    *,
    at: str = "",
    window: dict[str, Any] | None = None,
    rule: Any = None,
    **options: Any,
) -> AsyncGenerator[tuple[Page, Served, str]]:
    """The page at a path of its views, its server and the issuer: one that runs (`at`), or a new one of the options."""
    async with nullcontext(at) if at else pages_provider(*PEOPLE, **options) as issuer:
        sections = accounts(issuer, **(rule or {}))
        async with (
            serving(more={"accounts": sections["accounts"]}, server=sections["server"]) as served,
            open_page(f"{served.url}/{path}", other_origin=issuer, **(window or {})) as page,
        ):
            yield page, served, issuer


async def begin(page: Page, issuer: str) -> None:
    host = urlsplit(issuer).netloc
    await page.get_by_role("dialog").get_by_role("button", name=f"Sign in with {host}").click()
    await page.wait_for_url(f"{issuer}/oauth2/authorize*")


async def sign_in(page: Page, issuer: str, person: str = "ada") -> None:
    await begin(page, issuer)
    await page.get_by_role("button", name=person, exact=True).click()


async def calls_of(issuer: str) -> list[dict[str, Any]]:
    """Return the calls of the issuer's token endpoint since it began."""
    async with httpx2.AsyncClient() as client:
        return (await client.get(f"{issuer}/calls")).json()


async def stored(page: Page) -> dict[str, str]:
    return await page.evaluate("({...sessionStorage})")


async def test_a_person_signs_in_and_comes_back_to_the_view_without_a_trace_in_the_address(
    open_page: OpenPage, shared_issuer: str
) -> None:
    requests: list[Request] = []
    before = await calls_of(shared_issuer)
    async with signing_in(open_page, "#/responses?status=failed", at=shared_issuer) as (page, served, issuer):
        page.on("request", lambda request: requests.extend([request]))
        await expect(page.get_by_role("dialog")).to_contain_text("wants to know who you are")
        await begin(page, issuer)
        query = {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}
        await page.get_by_role("button", name="ada", exact=True).click()
        await expect(page.get_by_role("heading", name="Responses")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.url == f"{served.url}/#/responses?status=failed"
        assert (query["response_type"], query["client_id"], query["scope"]) == ("code", CLIENT, "openid")
        assert query["redirect_uri"] == f"{served.url}/"
        (call,) = (await calls_of(issuer))[len(before) :]
        digest = hashlib.sha256(call["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == query["code_challenge"]
        assert "client_secret" not in call
        storage = await stored(page)
        assert set(storage) == {"stack.key", "stack.session"}
        assert call["code"] not in json.dumps(storage)
        assert storage["stack.key"] not in json.dumps(await page.evaluate("({...localStorage})"))
        assert await page.evaluate("document.cookie") == ""
        own = [
            request
            for request in requests
            if request.url.startswith(served.url) and not request.is_navigation_request()
        ]
        assert not [request.url for request in own if "code=" in request.url]
        assert {request.headers.get("referer") for request in own} == {None}
        await page.get_by_role("button", name="Account").click()
        await expect(page.get_by_role("dialog")).to_contain_text("oidc:ada")
        await page.keyboard.press("Escape")
        await page.go_back()
        assert "code=" not in page.url


async def test_an_answer_with_another_state_is_not_used_and_its_words_are_not_shown(
    open_page: OpenPage, shared_issuer: str
) -> None:
    before = await calls_of(shared_issuer)
    async with signing_in(open_page, at=shared_issuer) as (page, served, issuer):
        await begin(page, issuer)
        for answer in ("code=stolen&state=other", "error=x&error_description=Call+555&state=other", "code=stolen"):
            await page.goto(f"{served.url}/?{answer}")
            await expect(page.get_by_role("dialog")).to_contain_text("did not begin, or that is over")
            assert "555" not in await page.content()
            assert page.url == f"{served.url}/"
        assert await calls_of(issuer) == before
        assert "stack.key" not in await stored(page)


async def test_what_the_issuer_refuses_is_shown_as_text_and_leaves_the_old_key(open_page: OpenPage) -> None:
    words = "<img src=x onerror=\"document.title='owned'\"> no & never"
    async with signing_in(open_page, "#/files", denial={"error_description": words}) as (page, served, issuer):
        await begin(page, issuer)
        await page.get_by_role("button", name="Deny").click()
        reason = page.get_by_role("dialog").get_by_role("alert")
        await expect(reason).to_contain_text(f"did not sign you in. {words} (access_denied)")
        assert page.url == f"{served.url}/#/files"
        assert "stack.key" not in await stored(page)
        assert "owned" not in await page.title()


@pytest.mark.parametrize(
    ("field", "words"),
    [("verifier", "<b>The verifier</b> is wrong (invalid_grant)"), ("nonce", "Its token belongs to another sign-in")],
)
async def test_a_code_of_another_sign_in_is_of_no_use(
    open_page: OpenPage, shared_issuer: str, field: str, words: str
) -> None:
    async with signing_in(open_page, at=shared_issuer) as (page, served, issuer):
        await begin(page, issuer)
        await page.goto(f"{served.url}/healthz")
        await page.evaluate(CHANGE_PENDING, field)
        await page.go_back()
        await page.get_by_role("button", name="ada", exact=True).click()
        await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text(words)
        assert "stack.key" not in await stored(page)


async def test_an_access_token_is_the_key_where_the_operator_says_so(open_page: OpenPage) -> None:
    rule = {"token": "access_token", "scopes": ["openid", "email"]}
    async with signing_in(open_page, "#/usage", rule=rule, access_audience=API) as (page, _, issuer):
        await begin(page, issuer)
        assert "scope=openid+email&" in page.url
        await page.get_by_role("button", name="ada", exact=True).click()
        await expect(page.get_by_role("heading", name="Usage")).to_be_visible()
        await page.get_by_role("button", name="Account").click()
        await expect(page.get_by_role("dialog")).to_contain_text("oidc:ada")
        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url(f"{issuer}/oauth2/end_session*")
        assert "id_token_hint" not in page.url


async def test_an_issuer_that_is_down_leaves_the_page_its_keys(open_page: OpenPage) -> None:
    sections = accounts(f"http://localhost:{free_port()}")
    async with (
        serving(more={"accounts": sections["accounts"]}, server=sections["server"]) as served,
        open_page(served.url) as page,
    ):
        await expect(page.get_by_role("dialog")).to_contain_text("identity provider cannot be read")
        await page.get_by_role("button", name="Use an API key instead").click()
        await page.get_by_label("Key", exact=True).fill(OLD_KEY)
        await page.get_by_role("button", name="Use this key").click()
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_a_token_that_has_expired_offers_to_sign_in_again(open_page: OpenPage) -> None:
    async with signing_in(open_page, "#/responses", life_s=2) as (page, _, issuer):
        await sign_in(page, issuer)
        await expect(page.get_by_role("heading", name="Responses")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await asyncio.sleep(2)
        await page.get_by_role("button", name="Refresh").click()
        await expect(page.get_by_role("dialog")).to_contain_text("Your sign-in ended at")
        await sign_in(page, issuer)
        await expect(page.get_by_role("heading", name="Responses")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_a_refresh_token_renews_the_token_once_for_many_requests(open_page: OpenPage) -> None:
    async with signing_in(open_page, "#/responses", life_s=4, refreshes=True) as (page, _, issuer):
        await sign_in(page, issuer)
        await expect(page.get_by_role("heading", name="Responses")).to_be_visible()
        await settle(page)
        before = await stored(page)
        for turn in range(2):
            await asyncio.sleep(3.5)
            await page.reload()
            await expect(page.get_by_role("heading", name="Responses")).to_be_visible()
            await settle(page)
            after = await stored(page)
            assert after["stack.key"] != before["stack.key"]
            assert [call["grant_type"] for call in await calls_of(issuer)] == [
                "authorization_code",
                *["refresh_token"] * (turn + 1),
            ]
            before = after
        await expect(page.get_by_role("dialog")).to_have_count(0)
        broken = json.loads(before["stack.session"]) | {"refreshToken": "other"}
        await page.evaluate("(text) => sessionStorage.setItem('stack.session', text)", json.dumps(broken))
        await asyncio.sleep(4)
        await page.get_by_role("button", name="Refresh").click()
        await expect(page.get_by_role("dialog")).to_contain_text(
            "does not renew it. invalid refresh token (invalid_grant)"
        )


async def test_signing_out_forgets_the_token_and_ends_the_session_at_the_issuer(
    open_page: OpenPage, shared_issuer: str
) -> None:
    async with signing_in(open_page, at=shared_issuer) as (page, served, issuer):
        await sign_in(page, issuer)
        await expect(page.get_by_role("heading", name="Playground")).to_be_visible()
        await page.get_by_role("button", name="Account").click()
        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url(f"{issuer}/oauth2/end_session*")
        query = {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}
        assert (query["client_id"], query["post_logout_redirect_uri"]) == (CLIENT, f"{served.url}/")
        assert query["id_token_hint"].count(".") == 2
        await page.get_by_role("button", name="End session").click()
        await expect(page.get_by_role("dialog")).to_contain_text("wants to know who you are")
        assert await stored(page) == {}
        for _ in range(3):
            await page.go_back()
            if page.url.startswith(served.url):
                await expect(page.get_by_role("dialog")).to_contain_text("wants to know who you are")


async def test_a_person_without_a_role_reads_that_the_server_refuses_the_token(
    open_page: OpenPage, shared_issuer: str
) -> None:
    async with signing_in(open_page, at=shared_issuer) as (page, _, issuer):
        await sign_in(page, issuer, "eve")
        await expect(page.get_by_role("dialog")).to_contain_text("does not accept its token: the server's log says why")
        await page.get_by_role("button", name="Use an API key instead").click()
        await page.get_by_label("Key", exact=True).fill(OLD_KEY)
        await page.get_by_role("button", name="Use this key").click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert await stored(page) == {"stack.key": OLD_KEY}


async def test_an_access_token_that_is_no_jwt_is_not_used(open_page: OpenPage, shared_issuer: str) -> None:
    async with signing_in(open_page, at=shared_issuer, rule={"token": "access_token"}) as (page, _, issuer):
        await sign_in(page, issuer)
        await expect(page.get_by_role("dialog")).to_contain_text("an access token that is no JSON Web Token")
        assert "stack.key" not in await stored(page)


async def test_the_recipe_of_two_teams_signs_a_person_in(open_page: OpenPage) -> None:
    async with practice_provider(program("identity_provider.py")) as issuer:
        loaded = await asyncio.to_thread(load_config, str(CONFIG), env={"OIDC_ISSUER": issuer})
        sections = loaded.model_dump(exclude_unset=True)
        server = {"console": sections["server"]["console"]}
        async with (
            serving(more={"accounts": sections["accounts"]}, server=server) as served,
            open_page(f"{served.url}/#/usage", other_origin=issuer) as page,
        ):
            directory = stored_organization(served.stack.accounts).directory
            await directory.create_project("red", project_id="red")
            await sign_in(page, issuer)
            await expect(page.locator(".key-facts")).to_contain_text("read, responses")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
async def test_axe_finds_nothing_in_the_dialogs_of_sign_in(
    open_page: OpenPage, shared_issuer: str, scheme: str, width: int
) -> None:
    window = window_of(width, scheme)
    wrong: list[str] = []
    async with signing_in(open_page, at=shared_issuer, window=window) as (page, _, issuer):
        await expect(page.get_by_role("dialog")).to_be_visible()
        await look(page, "sign-in", wrong)
        await begin(page, issuer)
        await page.get_by_role("button", name="Deny").click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        await look(page, "denied", wrong)
        await page.get_by_role("button", name="Use an API key instead").click()
        await look(page, "key", wrong)
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Key!").click()
        await sign_in(page, issuer)
        await expect(page.get_by_role("dialog")).to_have_count(0)
        if width < 720:
            await page.get_by_role("button", name="More").click()
        await page.get_by_role("button", name="Account").click()
        await look(page, "signed-in", wrong)
    assert not wrong, "\n".join(sorted(set(wrong)))
