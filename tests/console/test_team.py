"""Team and Usage in Chromium: projects, keys, limits and usage, each for those whose key allows it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from openai import NotFoundError, PermissionDeniedError
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.team_stack import ROOT, Team, bare_team, team
from tests.console.test_accessibility import MARK, UNREACHED, look, settle, window_of
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console
TABS = ("projects", "keys", "limits", "usage", "administrators")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack() -> AsyncGenerator[Team]:
    """A team with a month of usage. Tests add keys to it, and change nothing that is there."""
    async with team() as stack:
        yield stack


@asynccontextmanager
async def keyed(open_page: OpenPage, url: str, key: str, path: str = "", **options: Any) -> AsyncGenerator[Page]:
    """Open the page with a key in its tab, at a path of its views."""
    async with open_page(f"{url}/healthz", **options) as page:
        await page.evaluate("(key) => sessionStorage.setItem('stack.key', key)", key)
        await page.goto(f"{url}/#/{path}")
        await settle(page)
        yield page


async def test_a_project_is_created_renamed_and_archived(open_page: OpenPage) -> None:
    async with bare_team() as (served, organization), keyed(open_page, served.url, ROOT, "team") as page:
        await expect(page.get_by_text("There is no project yet.")).to_be_visible()
        await page.get_by_label("Name of the new project").fill("Support")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Rename Support").click()
        await page.get_by_role("textbox", name="Name", exact=True).fill("Support desk")
        await page.keyboard.press("Enter")
        await expect(page.locator("tbody tr")).to_contain_text("Support desk")
        assert [project.name async for project in organization.projects.list()] == ["Support desk"]
        await page.get_by_role("link", name="Keys").click()
        await expect(page.get_by_text("Support desk has no key.")).to_be_visible()
        await page.go_back()
        await page.get_by_role("button", name="Archive").click()
        await expect(page.get_by_text("its keys are refused for ever")).to_be_visible()
        await page.locator(".ask .danger").click()
        await expect(page.get_by_text("There is no project yet.")).to_be_visible()
        await page.get_by_label("archived ones too").check()
        await expect(page.locator("tbody .status")).to_have_text("archived")


async def test_a_key_is_created_with_its_rights_shown_once_and_revoked(open_page: OpenPage) -> None:
    async with bare_team() as (served, organization):
        project = await organization.projects.create(name="Desk")
        async with keyed(open_page, served.url, ROOT, "team/keys") as page:
            await page.get_by_role("button", name="New key").first.click()
            await page.get_by_label("Name", exact=True).fill("bot")
            await page.get_by_label("responses chat").check()
            await page.get_by_label("Other models").fill("no-such-model")
            await page.get_by_label("web_search").check()
            await page.get_by_label("Expires").select_option("7")
            await page.get_by_role("button", name="Create the key").click()
            value = await page.get_by_label("Key", exact=True).input_value()
            await page.get_by_role("button", name="Done").click()
            await expect(page.locator("tbody tr")).to_contain_text("model:no-such-model")
            await page.reload()
            row = page.locator("tbody tr")
            await expect(row).to_contain_text("tool:web_search")
            assert value not in await page.content()
            await expect(row.locator(".amber time")).to_be_visible()
            (key,) = [key async for key in organization.projects.api_keys.list(project.id)]
            assert (key.name, key.owner.service_account.name) == ("bot", "bot")
            assert key.scopes == ["responses", "model:no-such-model", "tool:web_search"]
            async with sdk_client(served.url, value) as client:
                with pytest.raises(PermissionDeniedError, match="no-such-model"):
                    await client.responses.create(model="scripted", input="Hi")
            await page.get_by_role("button", name="Revoke").click()
            await page.locator(".ask .danger").click()
            await expect(page.get_by_text("Desk has no key.")).to_be_visible()
            assert [key async for key in organization.projects.api_keys.list(project.id)] == []


async def test_an_error_of_a_new_key_names_its_field_and_the_second_try_reuses_the_account(
    open_page: OpenPage,
) -> None:
    async with bare_team() as (served, organization):
        project = await organization.projects.create(name="Desk")
        async with keyed(open_page, served.url, ROOT, "team/keys") as page:
            await page.get_by_role("button", name="New key").first.click()
            await page.get_by_label("Name", exact=True).fill("bot")
            await page.get_by_label("Other tools").fill("x" * 300)
            await page.get_by_role("button", name="Create the key").click()
            await expect(page.get_by_role("alert")).to_contain_text("param scopes")
            await page.get_by_label("Other tools").fill("")
            await page.get_by_role("button", name="Create the key").click()
            await expect(page.get_by_label("Key", exact=True)).to_be_visible()
        accounts = [account async for account in organization.projects.service_accounts.list(project.id)]
        assert len(accounts) == 1


async def test_limits_of_project_key_and_model_are_set_and_lifted(open_page: OpenPage) -> None:
    async with bare_team() as (served, organization):
        project = await organization.projects.create(name="Desk")
        account = await organization.projects.service_accounts.create(project.id, name="bot")
        async with keyed(open_page, served.url, ROOT, "team/limits") as page:
            await page.get_by_label("Limit a key").select_option(label="Secret Key")
            for name, bound in (("Whole project", "1,500"), ("Secret Key", "70"), ("scripted", "0")):
                await page.get_by_label(f"requests per day of {name}").fill(bound)
                await page.get_by_role("button", name=f"Save the limits of {name}").click()
                await expect(page.get_by_role("button", name=f"Save the limits of {name}")).to_have_count(0)
            await page.get_by_label("tokens per month of scripted").fill("many")
            await expect(page.get_by_role("alert")).to_contain_text("a whole number")
            await page.reload()
            await expect(page.get_by_label("requests per day of Whole project")).to_have_value("1,500")
            await expect(page.get_by_label("requests per day of Secret Key")).to_have_value("70")
            limits = {
                limit.model: limit.max_requests_per_1_day
                async for limit in organization.projects.rate_limits.list_rate_limits(project.id)
            }
            assert limits == {"*": 1500, f"key:{account.api_key.id}": 70, "scripted": 0}
            await page.get_by_label("requests per day of scripted").fill("")
            await page.get_by_role("button", name="Save the limits of scripted").click()
            await expect(page.get_by_role("button", name="Save the limits of scripted")).to_have_count(0)
        page_of_limits = await organization.projects.rate_limits.list_rate_limits(project.id)
        (lifted,) = [limit for limit in page_of_limits.data if limit.model == "scripted"]
        assert lifted.max_requests_per_1_day == 1_000_000_000


async def test_stored_data_and_money_of_a_project_are_limited_in_units_that_people_use(open_page: OpenPage) -> None:
    async with bare_team() as (served, organization):
        project = await organization.projects.create(name="Desk")
        limits = organization.projects.rate_limits
        async with keyed(open_page, served.url, ROOT, "team/limits") as page:
            data, money = (
                page.get_by_role("textbox", name=name) for name in ("Stored data in all", "Money per month, USD")
            )
            for field, wrong, rule in ((data, "20 GB", "20 GiB"), (money, "12,50", "1,250.50")):
                await field.fill(wrong)
                await expect(page.get_by_role("alert")).to_contain_text(rule)
                await expect(page.get_by_role("button", name="Save the limit of")).to_be_disabled()
                await page.get_by_role("button", name="Undo").click()
            for field, typed, text in ((data, "1536m", "1.5 GiB"), (money, "1,250.5", "1,250.50")):
                await field.fill(typed)
                await page.keyboard.press("Enter")
                await expect(field).to_have_value(text)
            await expect(page.get_by_text("0.00 USD are spent")).to_be_visible()
            await page.get_by_label("background responses at a time of Whole project").fill("3")
            await page.get_by_role("button", name="Save the limits of Whole project").click()
            await expect(page.get_by_role("button", name="Save")).to_have_count(0)
            (whole,) = [limit for limit in (await limits.list_rate_limits(project.id)).data if limit.model == "*"]
            assert (whole.max_stored_bytes, whole.max_background_responses) == (3 * 2**29, 3)
            assert (await organization.projects.spend_limit.retrieve(project.id)).threshold_amount == 125_050
            await page.reload()
            await expect(data).to_have_value("1.5 GiB")
            await expect(money).to_have_value("1,250.50")
            await expect(page.get_by_label("background responses at a time of Whole project")).to_have_value("3")
            await expect(page.get_by_label("stored data in all of scripted")).to_have_count(0)
            for field in (data, money):
                await field.fill("")
                await page.keyboard.press("Enter")
                await expect(page.get_by_role("button", name="Save")).to_have_count(0)
        (whole,) = [limit for limit in (await limits.list_rate_limits(project.id)).data if limit.model == "*"]
        assert whole.max_stored_bytes == 2**53
        with pytest.raises(NotFoundError):
            await organization.projects.spend_limit.retrieve(project.id)


async def test_usage_is_charted_by_model_project_and_key(open_page: OpenPage, stack: Team) -> None:
    async with keyed(open_page, stack.served.url, ROOT, "team/usage") as page:
        await expect(page.locator(".sums tbody tr")).to_have_count(2)
        await page.get_by_label("Group by").select_option("project")
        await expect(page.locator(".sums tbody")).to_contain_text("Research")
        await page.get_by_label("Range").select_option("30 days")
        await expect(page.locator(".bar-chart rect")).to_have_count(2 * 30)
        await page.get_by_label("Group by").select_option("key")
        await expect(page.locator(".sums tbody")).to_contain_text("ticket-bot · reporting")
        await page.get_by_label("Show").select_option("requests")
        await page.locator(".bar select").select_option(label="Support desk")
        await expect(page.locator(".sums tbody tr")).to_have_count(3)
        await page.reload()
        await expect(page.locator(".sums tbody tr")).to_have_count(3)
        cells = await page.locator(".sums tr td:nth-child(3)").all_text_contents()
        sums = [int(cell.split()[-1].replace(",", "")) for cell in cells]
        assert sum(sums[:-1]) == sums[-1] > 0
        await page.locator(".bar-chart .plot").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(".bar-chart figcaption")).to_contain_text("requests")


async def test_a_holder_sees_its_own_usage_and_limits_and_no_team(open_page: OpenPage, stack: Team) -> None:
    async with sdk_client(stack.served.url, stack.holder) as client:
        await client.responses.create(model="scripted", input="Hi")
    async with keyed(open_page, stack.served.url, stack.holder, "usage") as page:
        await expect(page.locator(".key-facts")).to_contain_text("file_search, web_search")
        await expect(page.locator(".sums tbody tr")).to_have_count(2)
        await expect(page.locator(".own-limits")).to_contain_text("2,000 requests per day")
        await expect(page.locator(".own-limits")).to_contain_text("50,000,000 tokens per month")
        await expect(page.locator(".own-limits")).to_contain_text("20 GiB stored data in all")
        rail = page.get_by_role("navigation", name="Views").get_by_role("link")
        names = await rail.all_inner_texts()
        assert "Usage" in names
        assert not {"Team", "Files"} & set(names)
        await page.goto(f"{stack.served.url}/#/team")
        await expect(page.get_by_role("alert")).to_contain_text("needs the scope admin")


async def test_a_key_of_an_administrator_begins_with_the_team(open_page: OpenPage, stack: Team) -> None:
    async with keyed(open_page, stack.served.url, stack.admin) as page:
        await expect(page.get_by_role("heading", name="Team")).to_be_visible()
        assert await page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts() == [
            "Figures",
            "Team",
        ]
        await page.get_by_role("tab", name="administrators").click()
        await page.get_by_role("button", name="New key").click()
        await page.get_by_label("Name", exact=True).fill("second")
        await page.get_by_role("button", name="Create the key").click()
        await expect(page.get_by_label("Key", exact=True)).not_to_be_empty()
        await expect(page.locator("tbody tr")).to_have_count(2)


async def test_a_server_without_keys_offers_neither_team_nor_usage(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/#/usage") as page:
        await expect(page.locator(".empty")).to_contain_text("Usage is not stored here")
        names = await page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts()
        assert not {"Team", "Usage"} & set(names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
async def test_axe_finds_nothing_and_every_view_of_a_team_fits(
    open_page: OpenPage, stack: Team, scheme: str, width: int
) -> None:
    window = window_of(width, scheme)
    wrong: list[str] = []
    async with keyed(open_page, stack.served.url, ROOT, "team", **window) as page:
        for tab in TABS:
            await page.goto(f"{stack.served.url}/#/team/{tab}")
            await look(page, tab, wrong)
        await page.goto(f"{stack.served.url}/#/team/keys")
        await page.get_by_role("button", name="New key").click()
        await look(page, "new key", wrong)
        await page.get_by_label("Name", exact=True).fill("bot")
        await page.get_by_role("button", name="Create the key").click()
        await page.locator(".secret").wait_for()
        await look(page, "secret", wrong)
    async with keyed(open_page, stack.served.url, stack.holder, "usage", **window) as page:
        await look(page, "usage", wrong)
        await page.locator(".bar-chart .plot").hover()
        await look(page, "usage read out", wrong)
    assert not wrong, "\n".join(sorted(set(wrong)))


async def test_the_keyboard_alone_reaches_every_control_of_a_team(open_page: OpenPage, stack: Team) -> None:
    wrong: list[str] = []
    async with keyed(open_page, stack.served.url, ROOT) as page:
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await expect(page.get_by_role("heading", name="Team")).to_be_visible()
        await page.get_by_role("tab", name="projects").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("tab", name="keys")).to_be_focused()
        for tab in TABS:
            await page.goto("about:blank")
            await page.goto(f"{stack.served.url}/#/team/{tab}")
            await settle(page)
            if tab == "keys":
                await page.get_by_role("button", name="New key").click()
            rounds = 0
            while rounds < 2:  # from where the focus is to the end of the page, and once round
                await page.keyboard.press("Tab")
                again, is_visible = await page.evaluate(MARK)
                if not is_visible:
                    wrong.append(f"{tab}: {await page.evaluate('document.activeElement.outerHTML.slice(0, 120)')}")
                rounds += again
            wrong += [f"{tab}: {control}" for control in await page.evaluate(UNREACHED)]
    assert not wrong, "\n".join(wrong)
