"""What hosted calls told, on its way to a client that keeps it for us, and back.

An item says to a client what was done; what the model was told, it does not say. Where nobody else keeps that, the item
carries it sealed, in a field of its own (`encrypted_content`, as reasoning has one), so that the item given back means
the same to the model as it did.
"""

import base64
import binascii
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from apis.responses import CreateResponse
from apis.wire.items import Item
from providers.responses.context.conversation import Conversation
from providers.responses.context.replay import rewrite_for_model
from providers.responses.context.sealed_reasoning import ENCRYPTED_CONTENT_INCLUDE, SealedReasoning
from providers.responses.context.sealing import Sealer, UnsealError
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.item_types import HOSTED_CALL_TYPES, REPLAYED_TYPES
from providers.responses.tools.models import ModelCatalog

SEALED_FIELD: Final = "encrypted_content"
_ANY_MODEL_BINDING: Final = "told"
"""Unlike a thought, it may be told to any model."""
_MAX_BYTES: Final = 16 * 1024 * 1024

_decode = msgspec.json.Decoder(ToolResultRecord).decode
_encode = msgspec.json.Encoder().encode


class SealedToolResults:
    """Seals what leaves, and finds again what was told, whoever kept it."""

    def __init__(self, sealed_reasoning: SealedReasoning, model_catalog: ModelCatalog) -> None:
        self._sealed_reasoning = sealed_reasoning
        self._model_catalog = model_catalog

    async def build_seal(self, request: CreateResponse, tenant: str) -> Callable[[ToolResultRecord], str] | None:
        """What seals it, where the client asks for it or nobody else would keep it."""
        if ENCRYPTED_CONTENT_INCLUDE not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self._sealed_reasoning.load_sealer()

        def seal(told: ToolResultRecord) -> str:
            packed = base64.b64encode(zlib.compress(_encode(told))).decode()
            return sealer.seal(packed, tenant=tenant, model=_ANY_MODEL_BINDING)

        return seal

    async def restore_tool_results(self, conversation: Conversation, model: str, tenant: str) -> None:
        """Make `conversation.told` all that is known of its hosted calls, in the words of the model. A token that says
        nothing here is passed over: then the item says what it can."""
        unknown = (
            (item.id, item) for item in conversation.items if item.id and item.id not in conversation.tool_results
        )
        sealed = {identity: token for identity, item in unknown if (token := _sealed_token(item))}
        if sealed:
            sealer = await self._sealed_reasoning.load_sealer()
            opened = {identity: _unseal_result(sealer, token, tenant) for identity, token in sealed.items()}
            conversation.tool_results.update({identity: told for identity, told in opened.items() if told is not None})
        calls = [item for item in conversation.items if item.type in REPLAYED_TYPES]
        if calls:
            rewrite_for_model(calls, conversation.tool_results, await self._model_catalog.native_tools(model))


def _unseal_result(sealer: Sealer, token: str, tenant: str) -> ToolResultRecord | None:
    try:
        packed = base64.b64decode(sealer.unseal(token, tenant=tenant, model=_ANY_MODEL_BINDING))
        return _decode(zlib.decompressobj().decompress(packed, _MAX_BYTES))
    except (UnsealError, binascii.Error, zlib.error, msgspec.DecodeError):
        return None


def _sealed_token(item: Item) -> str | None:
    token = (item.model_extra or {}).get(SEALED_FIELD) if item.type in HOSTED_CALL_TYPES else None
    return token if isinstance(token, str) else None
