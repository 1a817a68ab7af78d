"""Every hosted item that a response puts out, given back in every way there is: the model is shown the same again."""

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apis.chat import ChatRequest, NativeToolName
from apis.deltas import DeltaBatch
from apis.inference import Model
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.file_search_stack import Filing, store_of
from tests.support.sdk.requests import bare, create, messages, refusal
from tests.support.sdk.web_pages import web
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import mcp, with_mcp
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
OWN: frozenset[NativeToolName] = frozenset({"browser", "python"})


class Both(Filing):
    """One script for two models, one with tools of its own and one without."""

    class Config(Filing.Config):
        pass

    async def models(self) -> Sequence[Model]:
        first, *others = await super().models()
        return [first, replace(first, id="native", native_tools=OWN), *others]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        async for step in super().chat(request.model_copy(update={"model": "scripted"})):
            yield step


class Every(Filing):
    """A scripted model that embeds too, and has a browser and a Python tool of its own where it is named `native`."""

    class Config(Filing.Config):
        pass

    async def models(self) -> Sequence[Model]:
        first, *others = await super().models()
        return [replace(first, native_tools=OWN) if first.id == "native" else first, *others]


def search(**fields: Any) -> Json:
    return call("web_search", '{"query": "rome"}', **fields)


def own(name: str, **arguments: Any) -> Json:
    return call(f"browser.{name}", json.dumps(arguments))


CASES: dict[str, tuple[str, list[Script]]] = {
    "a search": ("scripted", [[search()]]),
    "pages": (
        "scripted",
        [
            [search()],
            [call("open_page", '{"page": 1, "from_line": 2}')],
            [call("find_in_page", '{"pattern": "number 90", "page": 1}')],
        ],
    ),
    "a page that is not there": ("scripted", [[call("open_page", '{"page": 7}')]]),
    "the model's own browser": (
        "native",
        [
            [{"reasoning": "I look."}, own("search", query="rome")],
            [own("open", id=0, cursor=0)],
            [own("find", pattern="number 90")],
            [own("open", id=0, num_lines=3)],
        ],
    ),
    "code": ("scripted", [[call("python", '{"code": "print(6 * 7)"}')]]),
    "code that fails": ("scripted", [[call("python", '{"code": "1 / 0"}')]]),
    "code that cannot be read": ("scripted", [[call("python", '{"code": 5}')]]),
    "code of the model's own tool": ("native", [[{"call": "python", "arguments": "print(6 * 7)", "custom": True}]]),
    "files": ("scripted", [[call("file_search", '{"queries": ["whales"]}')]]),
    "a search in no files": ("scripted", [[call("file_search", "{}")]]),
    "a call of a server": ("scripted", [[call("real__echo", '{"text": "a"}')]]),
    "a call of a server, by a model with namespaces": ("native", [[call("real.echo", '{"text": "a"}')]]),
    "a call that its server fails": ("scripted", [[call("real__fail", "{}")]]),
    "calls of one turn and of the next": (
        "scripted",
        [
            [
                {"reasoning": "All at once."},
                {"text": "I look.", "phase": "commentary"},
                {"calls": [search(id="c1"), call("python", '{"code": "1"}', id="c2"), search(id="c3")]},
            ],
            [call("real__echo", '{"text": "b"}', id="c4"), call("python", '{"code": "2"}', id="c5")],
        ],
    ),
}
ANSWERS: list[Script] = [[{"text": "Done."}], [{"text": "Second."}], [{"text": "Third."}]]
NAMELESS = "sent back without ids, nothing stored"
CONVERSED = "put into a conversation, nothing stored"
HOW = [
    "chained",
    "sent back",
    "sent back, nothing stored",
    "sent back into a chain",
    "referred to",
    CONVERSED,
    NAMELESS,
]
VARIANTS = (
    "a search",
    "a page that is not there",
    "code that fails",
    "a search in no files",
    "a call that its server fails",
)
"""Cases whose items other cases have with another content: they go one way that is stored, and one that is not."""


def ways(case: str) -> Sequence[str]:
    return HOW[1:3] if case in VARIANTS else HOW


@asynccontextmanager
async def having_all(
    model: str, turns: list[Script], folder: Path, provider: str = "Every"
) -> AsyncGenerator[tuple[Served, list[Json]]]:
    """A stack with every hosted tool, whose model plays `turns` and then answers; and the tools, as declared."""
    script = [*turns, *ANSWERS]
    real = RealServer()
    async with web() as there, real.serving("streamable_http"):
        sections = there.sections
        members = {**sections["tool_runtime"]["providers"], "python": {"provider": "python"}}
        more = {
            "tool_runtime": {"provider": "toolbox", "providers": members},
            "tool_servers": with_mcp(real.url),
            "fetcher": sections["fetcher"],
            "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
            "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
        }
        inference = {"provider": f"{__name__}:{provider}", "model": model, "turns": script}
        async with serving(inference, more=more) as served:
            store_id, _ = await store_of(served)
            yield (
                served,
                [
                    {"type": "web_search"},
                    {"type": "code_interpreter", "container": {"type": "auto"}},
                    {"type": "file_search", "vector_store_ids": [store_id]},
                    mcp(real),
                    function("get"),
                ],
            )


async def send(served: Served, tools: list[Json], **fields: Any) -> Any:
    """A response to fields that reach the server as they are: the SDK looks at each item once for each type that items
    may have, which takes longer than the response."""
    return await create(served, extra_body={"tools": tools, **fields})


async def go_on(
    how: str, served: Served, tools: list[Json], said: list[Json], last: Any, text: str, **fields: Any
) -> Any:
    """The next response, after all that was `said` and the `last` response, whose items join what was said."""
    if how == "referred to":
        said += [{"type": "item_reference", "id": item.id} for item in last.output]
    else:
        said += [bare(item) for item in last.output]
    if how == NAMELESS:
        for item in said:
            if item.get("type") != "mcp_list_tools":
                item.pop("id", None)
    if how == CONVERSED:
        conversation = await served.client.conversations.create(extra_body={"items": said})
        said.append({"role": "user", "content": text})
        return await send(served, tools, input=text, conversation=conversation.id, store=False, **fields)
    said.append({"role": "user", "content": text})
    if how == "chained" or (how == "sent back into a chain" and last.store):
        return await send(served, tools, input=text, previous_response_id=last.id, **fields)
    return await send(served, tools, input=said, store="nothing stored" not in how, **fields)


@pytest.mark.parametrize("model", ["scripted", "native"])
async def test_what_was_put_out_and_is_given_back_is_the_same_to_the_model(model: str, tmp_path: Path) -> None:
    cases = {case: turns for case, (of_model, turns) in CASES.items() if of_model == model}
    script = [turn for case, turns in cases.items() for _ in ways(case) for turn in (*turns, *ANSWERS)]
    async with having_all(model, script, tmp_path) as (served, tools):
        for case, how in [(each, how) for each in cases for how in ways(each)]:
            is_stored = "nothing stored" not in how and "into" not in how
            first = await send(served, tools, model=model, input=[USER], store=is_stored)
            sent_messages = messages(served)
            assert len(sent_messages) > 2, "the model was told of its calls"
            said = [USER]
            second = await go_on(how, served, tools, said, first, "Go on.", model=model)
            sent_messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}]
            assert messages(served) == sent_messages, (case, how)
            await go_on(how, served, tools, said, second, "And on.", model=model)
            sent_messages += [{"role": "assistant", "content": "Second."}, {"role": "user", "content": "And on."}]
            assert messages(served) == sent_messages, (case, how)


async def test_an_item_that_the_chain_holds_already_is_refused(tmp_path: Path) -> None:
    async with having_all("scripted", [[search()]], tmp_path) as (served, tools):
        first = await create(served, input=[USER], tools=tools)
        items = [bare(item) for item in first.output]
        for again in (items[:1], [{"type": "item_reference", "id": items[1]["id"]}]):
            error = await refusal(served, input=[USER, *again], previous_response_id=first.id)
            assert (error["param"], again[0]["id"] in error["message"]) == ("input[1].id", True)


@pytest.mark.parametrize("stored", [True, False])
async def test_an_item_carries_its_result_only_if_it_is_not_stored(stored: bool, tmp_path: Path) -> None:
    async with having_all("scripted", [[search()]], tmp_path) as (served, tools):
        response = await create(served, tools=tools[:1], store=stored)
    assert ("encrypted_content" in bare(response.output[0])) != stored


async def test_what_is_carried_says_nothing_to_another_tenant_or_when_it_was_changed(tmp_path: Path) -> None:
    async with having_all("scripted", [[search()]], tmp_path) as (served, tools):
        first = await create(served, tools=tools[:1], store=False)
        item, answer = (bare(each) for each in first.output)
        token = item["encrypted_content"]
        for changed in (token[:-8] + "AAAAAAA=", "rs3.", "", 5, token[:40]):
            input_items = [USER, {**item, "encrypted_content": changed}, answer, USER]
            await create(served, input=input_items, store=False)
            assert messages(served)[2]["content"] == "[What this gave is not known any more.]"


async def test_pages_that_were_numbered_before_keep_their_numbers_when_nothing_is_stored(tmp_path: Path) -> None:
    turns: list[Script] = [[search()], [call("open_page", '{"page": 1}')]]
    async with having_all("scripted", turns, tmp_path) as (served, tools):
        first = await create(served, tools=tools[:1], store=False)
        for _ in range(2):
            await create(served, tools=tools[:1])  # the rest of the script
        items = [bare(item) for item in first.output]
        again = await create(served, tools=tools[:1], input=[USER, *items, USER], store=False)
        sent_results = [each["content"] for each in messages(served) if each["role"] == "tool"]
    assert again.output[1].action.url == first.output[1].action.url
    assert sent_results[1].startswith("[1] Rome")
    assert sent_results[2].startswith("[3] ")


NAMES: dict[str, list[str]] = {
    "scripted": ["web_search", "open_page", "find_in_page", "python", "real__echo"],
    "native": ["browser.search", "browser.open", "browser.find", "python", "real.echo"],
}
MIXED: dict[str, list[Script]] = {
    "native": [
        [own("search", query="rome")],
        [own("open", id=0, cursor=0)],
        [own("find", pattern="number 90")],
        [{"call": "python", "arguments": "6 * 7", "custom": True}],
        [call("real.echo", '{"text": "a"}')],
    ],
    "scripted": [
        [search()],
        [call("open_page", '{"page": 1}')],
        [call("find_in_page", '{"pattern": "number 90", "page": 1}')],
        [call("python", '{"code": "6 * 7"}')],
        [call("real__echo", '{"text": "a"}')],
    ],
}


def called(served: Served) -> list[str]:
    """Return the names of the calls in the model's input."""
    calls = [call for each in messages(served) for call in each.get("tool_calls", ())]
    return [each.get("function", each.get("custom"))["name"] for each in calls]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("model", "other"), [("native", "scripted"), ("scripted", "native")])
async def test_each_model_of_a_chain_gets_the_calls_under_its_own_names(
    model: str, other: str, stored: bool, tmp_path: Path
) -> None:
    how = "chained" if stored else "sent back, nothing stored"
    async with having_all("scripted", MIXED[model], tmp_path, "Both") as (served, tools):
        first = await create(served, model=model, tools=tools, store=stored, input=[USER])
        assert first.output[-1].content[0].text == "Done."
        assert called(served) == NAMES[model]
        sent_messages, said = messages(served), [USER]
        second = await go_on(how, served, tools, said, first, "Go on.", model=other)
        assert called(served) == NAMES[other]
        sent_turns = messages(served)
        assert [each for each in sent_turns if each["role"] == "tool"] == [
            each for each in sent_messages if each["role"] == "tool"
        ]
        code = next(each["tool_calls"][0] for each in sent_turns if "6 * 7" in str(each.get("tool_calls")))
        written = code["custom"]["input"] if other == "native" else json.loads(code["function"]["arguments"])["code"]
        assert written == "6 * 7"
        await go_on(how, served, tools, said, second, "And on.", model=model)
        assert messages(served)[: len(sent_messages)] == sent_messages
