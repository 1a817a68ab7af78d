"""`diagnostics`: why a prompt is not that of an earlier message with more messages after it."""

from typing import Any

import pytest

from tests.support.sdk.messages import ADD, HI, create, messages_client, replay, stream
from tests.support.servers.serving import scripted, serving

FIRST: Any = {"diagnostics": {"previous_message_id": None}, "system": "be kind", "tools": [ADD]}
GO_ON: Any = {"role": "user", "content": "go on"}
TURN: Any = scripted([{"text": "ok"}])


def after(message: Any, **fields: Any) -> Any:
    return {**FIRST, "diagnostics": {"previous_message_id": message.id}, **fields}


@pytest.mark.parametrize("send", [create, stream])
async def test_a_conversation_that_only_grows_has_no_difference(send: Any) -> None:
    async with serving(TURN) as served, messages_client(served) as client:
        first = await send(client, **FIRST)
        second = await send(client, [*HI, replay(first), GO_ON], **after(first))
        third = await send(client, [*HI, replay(first), GO_ON, replay(second), GO_ON], **after(second))
    assert [message.diagnostics for message in (first, second, third)] == [None] * 3
    assert len({message.id for message in (first, second, third)}) == 3


@pytest.mark.parametrize("send", [create, stream])
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model": "other"}, "model_changed"),
        ({"system": "be rude"}, "system_changed"),
        ({"tools": []}, "tools_changed"),
        ({"tools": [ADD, {**ADD, "name": "sub"}]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "hi where"}, GO_ON]}, "messages_changed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "unavailable"),
    ],
)
async def test_the_first_difference_is_named(send: Any, changes: Any, kind: str) -> None:
    changes = dict(changes)
    messages = changes.pop("messages", [*HI, GO_ON])
    model: Any = {"provider": "router", "providers": {"one": TURN}, "aliases": {"other": "scripted"}}
    async with serving(model) as served, messages_client(served) as client:
        first = await send(client, **FIRST)
        reason = (await send(client, messages, **after(first, **changes))).diagnostics.cache_miss_reason
    assert reason.type == kind
    if kind != "unavailable":
        assert reason.cache_missed_input_tokens > 0


async def test_a_billing_header_that_changes_is_no_difference() -> None:
    def system(number: int) -> Any:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
        return [header, {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]

    async with serving(TURN) as served, messages_client(served) as client:
        begun: Any = {**FIRST, "system": system(1)}
        first = await create(client, None, **begun)
        second = await create(client, [*HI, GO_ON], **after(first, system=system(2)))
    assert second.diagnostics is None


@pytest.mark.parametrize("name", ["msg_1", "msg_1.AQ", "msg_1.!!", "msg_ä.ö", "."])
async def test_a_message_without_a_fingerprint_is_not_found(name: str) -> None:
    """It asked for no diagnostics, or another server has made it."""
    async with serving(TURN) as served, messages_client(served) as client:
        plain = await create(client)
        for earlier in (name, plain.id):
            fields: Any = {**FIRST, "diagnostics": {"previous_message_id": earlier}}
            answer = await create(client, None, **fields)
            assert answer.diagnostics.cache_miss_reason.type == "previous_message_not_found"
