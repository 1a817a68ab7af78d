"""Stored responses and conversations in the page: the tree of a chain, search, deletion, deliveries of webhooks."""

from itertools import chain, repeat

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import scripted
from tests.support.servers.serving import serving
from tests.support.servers.webhook_receiver import receiving

pytestmark = pytest.mark.console


async def test_the_tree_shows_branches_and_leads_to_each_response(open_page: OpenPage) -> None:
    script = scripted(*([{"text": text}] for text in ("Root.", "Left.", "Right.", "Deep.")))
    async with serving(script) as served:
        create = served.client.responses.create
        root = await create(model="scripted", input="Hi")
        await create(model="scripted", input="Hi", previous_response_id=root.id)
        right = await create(model="scripted", input="Hi", previous_response_id=root.id)
        deep = await create(model="scripted", input="Hi", previous_response_id=right.id)
        async with open_page(f"{served.url}/#/responses/{deep.id}/tree") as page:
            await expect(page.get_by_text("4 responses, 1 branch")).to_be_visible()
            await expect(page.locator(".node")).to_have_count(4)
            await expect(page.locator(".node.path")).to_have_count(3)
            await expect(page.locator(".node.on")).to_contain_text("Deep.")
            await page.locator(".node", has_text="Left.").get_by_role("link").click()
            await expect(page.locator(".node.on")).to_contain_text("Left.")
            await expect(page.locator(".node.path")).to_have_count(2)


async def test_responses_are_searched_and_deleted_in_their_listing(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "About Oslo."}], [{"text": "About Rome."}])) as served:
        for _ in range(2):
            await served.client.responses.create(model="scripted", input="Hi")
        async with open_page(f"{served.url}/#/responses") as page:
            await expect(page.locator("tbody tr")).to_have_count(2)
            await page.keyboard.press("/")
            await page.keyboard.type("oslo")
            await page.keyboard.press("Enter")
            await expect(page.locator("tbody tr")).to_have_count(1)
            await page.reload()
            await expect(page.locator("tbody tr")).to_contain_text("About Oslo.")
            await page.get_by_role("button", name="Delete", exact=True).click()
            await page.locator(".ask .danger").click()
            await page.get_by_role("button", name="Show all").click()
            await expect(page.locator("tbody tr")).to_contain_text("About Rome.")


async def test_conversations_are_searched_and_lead_to_their_responses(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "In it."}], [{"text": "Outside."}])) as served:
        conversation = await served.client.conversations.create(metadata={"topic": "Fjords"})
        await served.client.conversations.create()
        await served.client.responses.create(model="scripted", input="Hi", conversation=conversation.id)
        await served.client.responses.create(model="scripted", input="Hi")
        async with open_page(f"{served.url}/#/conversations") as page:
            await expect(page.locator("tbody tr")).to_have_count(2)
            await page.get_by_label("Search").fill("fjord")
            await page.keyboard.press("Enter")
            await expect(page.locator("tbody tr")).to_have_count(1)
            await page.locator("td a").click()
            await page.get_by_role("link", name="Its responses").click()
            await expect(page.locator("tbody tr")).to_have_count(1)
            await expect(page.locator("tbody tr")).to_contain_text("In it.")
            await page.get_by_role("button", name="Of all conversations").click()
            await expect(page.locator("tbody tr")).to_have_count(2)


async def test_the_tries_of_webhooks_are_reached_from_the_runs(open_page: OpenPage) -> None:
    async with receiving() as receiver:
        answers = chain([503], repeat(200))
        receiver.answer = lambda: next(answers)
        responses, webhooks = {"background": {"poll_s": 0.05}}, {"receivers": [receiver.hook()]}
        async with serving(responses=responses, webhooks=webhooks) as served:
            await served.client.responses.create(model="scripted", input="Hi", background=True)
            await receiver.come(2)
            async with open_page(f"{served.url}/#/runs") as page:
                await page.get_by_role("link", name="Webhooks").click()
                delivery = page.locator(".delivery")
                await expect(delivery).to_contain_text("response.completed")
                await expect(delivery.locator("tbody tr")).to_have_count(2)
                await expect(delivery.locator("td.bad")).to_have_text("503")
                await expect(delivery.locator(".status")).to_have_text("delivered")
