"""A better model by one click: the page offers what the machine runs, shows the fetch, and says what went wrong."""

from typing import Any

import pytest
from openai import APIStatusError, PermissionDeniedError
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.installing import DrivenInstaller
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.console
INSTALLING = {"provider": "tests.console.installing:Installing"}


def driven(served: Served) -> DrivenInstaller:
    provider: Any = served.stack.providers_by_path["inference"]
    return provider.driven


async def test_a_better_model_is_fetched_by_one_click_and_used(open_page: OpenPage) -> None:
    async with serving(INSTALLING) as served, open_page(f"{served.url}/") as page:
        offer = page.get_by_role("region", name="Models of this machine")
        await expect(offer).to_contain_text("This machine runs a better model: better-4b 3.0 GB")
        await offer.get_by_text("All models that can be fetched").click()
        await expect(offer.get_by_role("button", name="Fetch huge-120b")).to_be_disabled()
        await expect(offer).to_contain_text("it needs 65.0 GB of memory")
        await offer.get_by_role("button", name="Fetch it").click()
        await expect(offer).to_contain_text("1.0 GB of 3.0 GB")
        await page.reload()
        await offer.get_by_role("button", name="Cancel").click()
        await expect(offer).to_contain_text("was cancelled. What was fetched stays")
        await offer.get_by_role("button", name="Fetch it").click()
        driven(served).end("someone/tiny is gated. Accept its terms at the hub.")
        await expect(offer.get_by_role("alert")).to_contain_text("Accept its terms at the hub.")
        await offer.get_by_role("button", name="Try again").click()
        driven(served).end()
        await offer.get_by_role("button", name="Use it").click()
        await expect(page.get_by_label("Model", exact=True)).to_have_value("better-4b")


async def test_only_administrators_fetch_where_there_are_keys() -> None:
    server = {"api_keys": [{"key": "sk-user", "tenant": "t"}, {"key": "sk-admin", "tenant": "t", "admin": True}]}
    async with serving(INSTALLING, server=server) as served:
        user, admin = (served.client.with_options(api_key=key) for key in ("sk-user", "sk-admin"))
        overview: Any = await user.get("/stack/overview", cast_to=object)
        assert overview["may_install_models"] is False
        with pytest.raises(PermissionDeniedError, match="admin"):
            await user.post("/stack/models/pull", body={"name": "better-4b"}, cast_to=object)
        assert driven(served).pull is None
        pull: Any = await admin.post("/stack/models/pull", body={"name": "better-4b"}, cast_to=object)
        assert (pull["object"], pull["status"]) == ("stack.model_pull", "in_progress")


async def test_a_server_without_an_installer_offers_nothing(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        await expect(page.get_by_text("What this server does not have yet")).to_be_visible()
        await expect(page.get_by_role("region", name="Models of this machine")).to_have_count(0)
        with pytest.raises(APIStatusError, match="installs_models: true"):
            await served.client.get("/stack/models", cast_to=object)
