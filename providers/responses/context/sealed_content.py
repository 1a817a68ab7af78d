"""SealedContent: reasoning and results of hosted calls that clients store for this server, encrypted, and send back.

The item of a hosted call shows the client what was done, not which text the model read. Where this server does not
store that text, the item carries it sealed in `encrypted_content`, as reasoning items do, and the model reads the same
text when the client sends the item back.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from openai.types.responses.response import InputTransformation
from pydantic import SecretStr

from apis.responses import CreateResponse
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.wire.item_types import CALLS_WITH_RESULTS, OUTPUT_TYPES, SEALED_TYPES
from apis.wire.items import Item, ReasoningItem, ReasoningText
from providers.common.fair_turns import do_in_turns
from providers.responses.context.sealing import Sealer, UnsealError, generate_key
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import ItemIndex

ENCRYPTED_CONTENT_INCLUDE: Final = "reasoning.encrypted_content"
_SEALED_FIELD: Final = "encrypted_content"
_ANY_MODEL_BINDING: Final = "any model"
"""It stands where reasoning has its model, because any model may read a tool result."""
_MAX_BYTES: Final = 16 * 1024 * 1024
_UNSEAL_WORK: Final = 400
"""Work of unsealing one item, as `fair_turns` counts it."""
_KEY_RECORD: Final = "/reasoning-key"
"""Key of the store's own sealing key; it belongs to no tenant."""

Seals = tuple[Callable[[str], str] | None, Callable[[ToolResultRecord], str] | None]

_decode = msgspec.json.Decoder(ToolResultRecord).decode
_encode = msgspec.json.Encoder().encode


class SealedContent:
    """Seals what responses hold for their clients and unseals what requests bring. Without `keys`, all workers on one
    store share a key that the first of them generates and stores there."""

    def __init__(self, keys: Sequence[SecretStr], kv: KVStore) -> None:
        self._kv = kv
        self._sealer = Sealer([key.get_secret_value().encode() for key in keys]) if keys else None

    async def load_sealer(self) -> Sealer:
        """Return the Sealer for everything that clients store for this server."""
        if self._sealer is None:
            key = generate_key()
            if await self._kv.write([Put(_KEY_RECORD, key, None, ABSENT)]) is None:
                entry = await self._kv.get(_KEY_RECORD)
                key = entry.value if entry is not None else key
            self._sealer = Sealer([key])
        return self._sealer

    async def build_seals(self, request: CreateResponse, tenant: str) -> Seals:
        """Return the functions that seal the response's reasoning and a tool result; None for a stored response, unless
        the request includes them."""
        if request.store is not False and ENCRYPTED_CONTENT_INCLUDE not in (request.include or ()):
            return None, None
        sealer = await self.load_sealer()

        def seal_reasoning(text: str) -> str:
            return sealer.seal(text, tenant=tenant, model=request.model, purpose="reasoning")

        def seal_result(tool_result: ToolResultRecord) -> str:
            packed = base64.b64encode(zlib.compress(_encode(tool_result))).decode()
            return sealer.seal(packed, tenant=tenant, model=_ANY_MODEL_BINDING, purpose="tool result")

        return seal_reasoning, seal_result

    async def unseal_reasoning(self, index: ItemIndex, model: str, tenant: str) -> Sequence[InputTransformation]:
        """Unseal the reasoning among the items that this model may read, and return the items that cannot be unsealed,
        which no model sees. Many are unsealed at turns of the tenant."""
        positions = index.positions(ReasoningItem)
        if all(item.encrypted_content is None for item in index.of(ReasoningItem)):
            return ()
        sealer = await self.load_sealer()
        removed: list[InputTransformation] = []

        def unseal(position: int) -> None:
            item = index.items[position]
            if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
                return
            try:
                text = sealer.unseal(item.encrypted_content, tenant=tenant, model=model, purpose="reasoning")
            except UnsealError as exc:
                if not item.content:  # else the client also sent the plain text
                    removed.append(
                        InputTransformation(id=item.id or "", action="removed", reason=exc.reason, type="reasoning")
                    )
            else:
                content = [ReasoningText(type="reasoning_text", text=text)] if text else []
                index.replace(position, item.model_copy(update={"content": content}))

        await do_in_turns(positions, unseal, _UNSEAL_WORK)
        return removed

    async def unseal_tool_results(
        self, index: ItemIndex, tool_results: Mapping[str, ToolResultRecord], tenant: str
    ) -> Mapping[str, ToolResultRecord]:
        """Return the results of hosted calls, by item id, with those that only sealed items hold. A token that cannot
        be opened is ignored: the item's own text is used then."""
        calls = (index.items[position] for position in index.named(CALLS_WITH_RESULTS))
        call_ids = {getattr(call, "call_id", None): call.id for call in calls}
        tokens: dict[str, str] = {}
        for position in index.named(SEALED_TYPES):
            item = index.items[position]
            item_id = call_ids.get(getattr(item, "call_id", None)) if item.type in OUTPUT_TYPES else item.id
            if item_id and item_id not in tool_results and (token := _sealed_token(item)):
                tokens[item_id] = token
        if not tokens:
            return tool_results
        sealer, unsealed = await self.load_sealer(), {**tool_results}

        def unseal(item_id: str) -> None:
            if (result := _unseal_result(sealer, tokens[item_id], tenant)) is not None:
                unsealed[item_id] = result

        await do_in_turns([*tokens], unseal, _UNSEAL_WORK)
        return unsealed


def _unseal_result(sealer: Sealer, token: str, tenant: str) -> ToolResultRecord | None:
    try:
        packed = base64.b64decode(sealer.unseal(token, tenant=tenant, model=_ANY_MODEL_BINDING, purpose="tool result"))
        return _decode(zlib.decompressobj().decompress(packed, _MAX_BYTES))
    except (UnsealError, binascii.Error, zlib.error, msgspec.DecodeError):
        return None


def _sealed_token(item: Item) -> str | None:
    token = (item.model_extra or {}).get(_SEALED_FIELD)
    return token if isinstance(token, str) else None
