"""SealedToolResults: results of hosted calls that clients store for this server, in the items of the calls.

The item of a hosted call shows the client what was done, not which text the model read. Where this server does not
store that text, the item carries it sealed in `encrypted_content`, as reasoning items do, and the model reads the same
text when the client sends the item back.
"""

import base64
import binascii
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from apis.responses import CreateResponse
from apis.wire.items import Item
from apis.wire.tool_items import ShellCallItem, ShellCallOutput
from providers.common.fair_turns import end_pass
from providers.responses.context.conversation import Conversation
from providers.responses.context.replay import rewrite_for_model
from providers.responses.context.sealed_reasoning import ENCRYPTED_CONTENT_INCLUDE, SealedReasoning
from providers.responses.context.sealing import Sealer, UnsealError
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.item_types import REPLAYED_TYPES, SEALED_TYPES
from providers.responses.tools.models import ModelCatalog

SEALED_FIELD: Final = "encrypted_content"
_ANY_MODEL_BINDING: Final = "any model"
"""It stands where reasoning has its model, because any model may read a tool result."""
_MAX_BYTES: Final = 16 * 1024 * 1024

_decode = msgspec.json.Decoder(ToolResultRecord).decode
_encode = msgspec.json.Encoder().encode


class SealedToolResults:
    """Seals the results of hosted calls, and restores them: from the store, from a sealed item or from its text."""

    def __init__(self, sealed_reasoning: SealedReasoning, model_catalog: ModelCatalog) -> None:
        self._sealed_reasoning = sealed_reasoning
        self._model_catalog = model_catalog

    async def build_seal(self, request: CreateResponse, tenant: str) -> Callable[[ToolResultRecord], str] | None:
        """Return the function that seals a result; None for a stored response, unless the request includes it."""
        if ENCRYPTED_CONTENT_INCLUDE not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self._sealed_reasoning.load_sealer()

        def seal(tool_result: ToolResultRecord) -> str:
            packed = base64.b64encode(zlib.compress(_encode(tool_result))).decode()
            return sealer.seal(packed, tenant=tenant, model=_ANY_MODEL_BINDING, purpose="tool result")

        return seal

    async def restore_tool_results(self, conversation: Conversation, model: str, tenant: str) -> Conversation:
        """Return the conversation with the result of every hosted call that is known, under the names that the model
        has for them. A token that cannot be opened is ignored: the item's own text is used then."""
        items, tool_results = conversation.items, conversation.tool_results
        await end_pass(items)
        calls_by_id = {item.call_id: item.id for item in items if isinstance(item, ShellCallItem)}
        tokens = {
            item_id: token
            for item in items
            if item.type in SEALED_TYPES
            and (item_id := calls_by_id.get(item.call_id) if isinstance(item, ShellCallOutput) else item.id)
            and item_id not in tool_results
            and (token := _sealed_token(item))
        }
        if tokens:
            sealer = await self._sealed_reasoning.load_sealer()
            unsealed = {item_id: _unseal_result(sealer, token, tenant) for item_id, token in tokens.items()}
            tool_results = {**tool_results, **{item_id: result for item_id, result in unsealed.items() if result}}
        calls = [item for item in items if item.type in REPLAYED_TYPES]
        if not (tokens or calls):
            return conversation
        if calls:
            native_tools = await self._model_catalog.native_tools(model)
            tool_results = await rewrite_for_model(calls, tool_results, native_tools)
        return msgspec.structs.replace(conversation, tool_results=tool_results)


def _unseal_result(sealer: Sealer, token: str, tenant: str) -> ToolResultRecord | None:
    try:
        packed = base64.b64decode(sealer.unseal(token, tenant=tenant, model=_ANY_MODEL_BINDING, purpose="tool result"))
        return _decode(zlib.decompressobj().decompress(packed, _MAX_BYTES))
    except (UnsealError, binascii.Error, zlib.error, msgspec.DecodeError):
        return None


def _sealed_token(item: Item) -> str | None:
    token = (item.model_extra or {}).get(SEALED_FIELD)
    return token if isinstance(token, str) else None
