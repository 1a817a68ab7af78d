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
from providers.responses.context.replay import HOSTED, RETOLD, retell
from providers.responses.context.sealed_reasoning import INCLUDED, KeptReasoning
from providers.responses.context.sealing import CannotOpen, Sealer
from providers.responses.events.tool_result import Told
from providers.responses.tools.models import Natives

FIELD: Final = "encrypted_content"
_ANY_MODEL: Final = "told"
"""Unlike a thought, it may be told to any model."""
_MAX_BYTES: Final = 16 * 1024 * 1024

_decode = msgspec.json.Decoder(Told).decode
_encode = msgspec.json.Encoder().encode


class KeptCalls:
    """Seals what leaves, and finds again what was told, whoever kept it."""

    def __init__(self, kept: KeptReasoning, natives: Natives) -> None:
        self._kept = kept
        self._natives = natives

    async def sealing(self, request: CreateResponse, tenant: str) -> Callable[[Told], str] | None:
        """What seals it, where the client asks for it or nobody else would keep it."""
        if INCLUDED not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self._kept.sealer()

        def seal(told: Told) -> str:
            packed = base64.b64encode(zlib.compress(_encode(told))).decode()
            return sealer.seal(packed, tenant=tenant, model=_ANY_MODEL)

        return seal

    async def recall(self, conversation: Conversation, model: str, tenant: str) -> None:
        """Make `conversation.told` all that is known of its hosted calls, in the words of the model. A token that says
        nothing here is passed over: then the item says what it can."""
        unknown = ((item.id, item) for item in conversation.items if item.id and item.id not in conversation.told)
        sealed = {identity: token for identity, item in unknown if (token := _sealed(item))}
        if sealed:
            sealer = await self._kept.sealer()
            opened = {identity: _open(sealer, token, tenant) for identity, token in sealed.items()}
            conversation.told.update({identity: told for identity, told in opened.items() if told is not None})
        calls = [item for item in conversation.items if item.type in RETOLD]
        if calls:
            retell(calls, conversation.told, await self._natives.of(model))


def _open(sealer: Sealer, token: str, tenant: str) -> Told | None:
    try:
        packed = base64.b64decode(sealer.open(token, tenant=tenant, model=_ANY_MODEL))
        return _decode(zlib.decompressobj().decompress(packed, _MAX_BYTES))
    except (CannotOpen, binascii.Error, zlib.error, msgspec.DecodeError):
        return None


def _sealed(item: Item) -> str | None:
    token = (item.model_extra or {}).get(FIELD) if item.type in HOSTED else None
    return token if isinstance(token, str) else None
