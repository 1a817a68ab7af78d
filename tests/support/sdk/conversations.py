"""Conversations of a served stack, through the SDK."""

from typing import Any

from tests.support.servers.serving import Served

NONE = "conv_" + "0" * 32


def user(text: str, **fields: Any) -> dict[str, Any]:
    """Return a message of the user, as an item."""
    return {"role": "user", "content": text, **fields}


def conversations(served: Served) -> Any:
    """The SDK's `client.conversations`."""
    return served.client.conversations


async def texts(served: Served, conversation_id: str, **fields: Any) -> list[str]:
    """Return the texts of a conversation, oldest first unless `fields` say otherwise."""
    item_texts = conversations(served).items.list(conversation_id, **{"order": "asc", **fields})
    return [item.content[0].text async for item in item_texts]


async def keys_of(served: Served) -> list[str]:
    """All that the store has of conversations."""
    return [key for key, _ in await served.stack.kv_store.scan("") if "/conversation" in key]


async def locked(served: Served) -> bool:
    """Return true while any conversation is being answered."""
    return any("floor" in key for key in await keys_of(served))
