"""Chats that come from files: those of this page, ChatGPT, llama.cpp and Open WebUI, and files that hold none."""

import json
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_accessibility import findings
from tests.console.test_chats import export_chat, turn
from tests.console.test_playground import ask, scripted
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

READ = """
async (texts) => {
  const { chatsIn } = await import("/console/imports.js");
  return texts.map((text) => {
    try {
      const seen = ({ role, content }) => [role, content.map((part) => part.text || part.type)];
      return chatsIn(JSON.parse(text)).map(({ title, items }) => [title, items.map(seen)]);
    } catch (error) {
      return error.message;
    }
  });
}
"""
CHATGPT: dict[str, Any] = {
    "title": "Rivers",
    "current_node": "d",
    "mapping": {
        "a": {"id": "a", "message": None, "parent": None, "children": ["b"]},
        "b": {
            "id": "b",
            "parent": "a",
            "message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["Q?"]}},
        },
        "c": {
            "id": "c",
            "parent": "b",
            "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["Old."]}},
        },
        "d": {
            "id": "d",
            "parent": "b",
            "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["A.", {}]}},
        },
    },
}
LLAMA: dict[str, Any] = {
    "conv": {"id": "x", "name": "Lakes", "currNode": "m2", "lastModified": 1},
    "messages": [
        {"id": "m0", "role": "system", "content": "", "parent": None, "type": "root"},
        {"id": "m1", "role": "user", "content": "Q?", "parent": "m0"},
        {"id": "m3", "role": "assistant", "content": "Old.", "parent": "m1"},
        {"id": "m2", "role": "assistant", "content": "A.", "parent": "m1"},
    ],
}
MESSAGES = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}]
PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
WEBUI: list[Any] = [{"title": "Seas", "chat": {"messages": MESSAGES}}, {"title": "Empty", "chat": {"messages": []}}]
LOOP: dict[str, Any] = {
    "title": "L",
    "current_node": "a",
    "mapping": {"a": {"id": "a", "parent": "a", "message": None}},
}
TALK = [["user", ["Q?"]], ["assistant", ["A."]]]
NONE = "No chat was found"


async def test_every_known_format_is_read_along_its_present_branch(open_page: OpenPage) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, PICTURE]},
        {"role": "tool", "content": "x"},
    ]
    files: list[Any] = [
        [CHATGPT],
        LLAMA,
        [LLAMA, CHATGPT],
        WEBUI,
        MESSAGES,
        {"messages": parts},
        LOOP,
        {},
        [],
        5,
        [None, "x"],
    ]
    async with serving() as served, open_page(f"{served.url}/") as page:
        read = await page.evaluate(READ, [json.dumps(file) for file in files])
    assert read[:5] == [
        [["Rivers", TALK]],
        [["Lakes", TALK]],
        [["Lakes", TALK], ["Rivers", TALK]],
        [["Seas", TALK]],
        [["Q?", TALK]],
    ]
    assert read[5] == [["Look", [["user", ["Look", "input_image"]]]]]
    assert all(message.startswith(NONE) for message in read[6:])


async def choose(page: Page, name: str, text: str) -> None:
    file = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
    await page.locator("input[data-import]").set_input_files(file)  # type: ignore[arg-type]  # a FilePayload


async def test_an_exported_chat_comes_back_and_goes_on(open_page: OpenPage) -> None:
    script = scripted([{"text": "The Loire."}], [{"text": "About 1006 km."}], [{"text": "It ends at Nantes."}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "Which river is the longest?")
        await turn(page, 1)
        await ask(page, "How long?")
        await turn(page, 2)
        saved = await export_chat(page, "JSON")
        await page.locator(".chats li").get_by_role("button", name="Actions").click()
        await page.locator(".chats .actions .danger").click()
        await page.locator(".chats .ask .danger").click()
        await expect(page.locator(".chats li")).to_have_count(0)
        await choose(page, "chat.json", "{")
        await expect(page.get_by_role("alert")).to_contain_text("chat.json is no JSON")
        await choose(page, "chat.json", saved)
        await page.locator(".chats li").get_by_role("link", name="Which river is the longest?").click()
        await turn(page, 2)
        await expect(page.locator("article.turn").nth(1)).to_contain_text("About 1006 km.")
        assert await findings(page) == []
        await ask(page, "Where does it end?")
        await turn(page, 3)
        await page.reload()
        await expect(page.get_by_text("It ends at Nantes.")).to_be_visible()
        await expect(page.get_by_text("The Loire.")).to_be_visible()
        await expect(page.locator(".chats li")).to_have_count(1)
        (response, *_) = (await served.client.get("/responses", cast_to=dict[str, Any]))["data"]
        items = await served.client.responses.input_items.list(response["id"], order="asc")
        assert [item.role for item in items.data if item.type == "message"] == [*("user", "assistant") * 2, "user"]
