"""The Agents SDK's compaction over a served stack: its session that compacts, and agents whose server does."""

from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIResponsesCompactionSession, OpenAIResponsesModel, SQLiteSession

from tests.support.sdk.agents_sdk import ENCRYPTED, RUNS, Run, add, adding, outputs
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import chat_requests, messages
from tests.support.servers.serving import Served, scripted, serving

MODEL = "gpt-oss"
DONE: Script = [{"text": ["Do", "ne."]}]
SUMMED: Script = [{"text": "They added one and two."}]
both = pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])
settings_of = pytest.mark.parametrize("settings", [ModelSettings(), ENCRYPTED], ids=["stored", "encrypted"])


def adder(served: Served, settings: ModelSettings) -> Agent[Any]:
    model = OpenAIResponsesModel(MODEL, served.client)
    return Agent(name="Adder", instructions="Be exact.", model=model, model_settings=settings, tools=[add])


def said(served: Served) -> list[tuple[str, str]]:
    return [(each["role"], str(each.get("content", "")).split("\n\n")[-1]) for each in messages(served)]


@both
@settings_of
async def test_a_session_compacts_what_it_keeps(run: Run, settings: ModelSettings) -> None:
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2, id="c1")], DONE, SUMMED, DONE]
    async with serving(scripted(*turns, model=MODEL)) as served:
        session_items = SQLiteSession("s")
        session = OpenAIResponsesCompactionSession(
            "s",
            session_items,
            client=served.client,
            model=MODEL,
            should_trigger_compaction=lambda context: len(context["compaction_candidate_items"]) >= 4,
        )
        who = adder(served, settings)
        first = await run(who, "one", session=session)
        items: Any = await session_items.get_items()
        second = await run(who, "two", session=session)
        summing, sent_messages = chat_requests(served)[2], said(served)
        session_items.close()
    assert [item.get("type") or item["role"] for item in items] == ["message", "compaction"]
    assert summing.tools is None
    assert [each.role for each in summing.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert sent_messages == [
        ("developer", "Be exact."),
        ("user", "one"),
        ("user", "They added one and two."),
        ("user", "two"),
    ]
    assert first.context_wrapper.usage.requests == 3
    assert second.final_output == "Done."


@both
async def test_it_is_compacted_when_it_is_asked_to_be(run: Run) -> None:
    async with serving(scripted(DONE, SUMMED, DONE, SUMMED, DONE, model=MODEL)) as served:
        session_items = SQLiteSession("s")
        session = OpenAIResponsesCompactionSession("s", session_items, client=served.client, model=MODEL)
        who = adder(served, ModelSettings())
        for word in ("one", "two"):
            await run(who, word, session=session)
            await session.run_compaction({"force": True})
        await run(who, "three", session=session)
        sent_messages = said(served)
        session_items.close()
    assert sent_messages[1:] == [
        ("user", "one"),
        ("user", "two"),
        ("user", "They added one and two."),
        ("user", "three"),
    ]


@both
@settings_of
async def test_the_server_compacts_an_agents_run(run: Run, settings: ModelSettings) -> None:
    managing = settings.resolve(ModelSettings(context_management=[{"type": "compaction", "compact_threshold": 6}]))
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2, id="c1")], SUMMED, DONE, DONE]
    async with serving(scripted(*turns, model=MODEL)) as served:
        who = adder(served, managing)
        result = await run(who, "Add one and two.")
        first = said(served)
        await run(adder(served, settings), [*result.to_input_list(), {"role": "user", "content": "two"}])
        second = said(served)
    assert result.final_output == "Done."
    assert outputs(result) == ["reasoning", "function_call", "compaction", "message"]
    assert first[1:] == [("user", "Add one and two."), ("user", "They added one and two.")]
    assert second[1:] == [*first[1:], ("assistant", "Done."), ("user", "two")]
