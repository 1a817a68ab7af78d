"""SealedReasoning: encrypted reasoning that clients store for this server and send back."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from openai.types.responses.response import InputTransformation
from pydantic import SecretStr

from apis.responses import CreateResponse
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.wire.items import Item, ReasoningItem, ReasoningText
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.sealing import Sealer, UnsealError, generate_key
from providers.responses.store.history_cache import LoadedHistory

ENCRYPTED_CONTENT_INCLUDE: Final = "reasoning.encrypted_content"
_UNSEAL_WORK: Final = 400
"""Work of unsealing one item, as `fair_turns` counts it."""
_KEY_RECORD: Final = "/reasoning-key"
"""Key of the store's own sealing key; it belongs to no tenant."""


class SealedReasoning:
    """Seals the reasoning of responses and unseals that of requests. Without `keys`, all workers on one store share a
    key that the first of them generates and stores there."""

    def __init__(self, keys: Sequence[SecretStr], kv: KVStore) -> None:
        self._kv = kv
        self._sealer = Sealer([key.get_secret_value().encode() for key in keys]) if keys else None

    async def build_seal(self, request: CreateResponse, tenant: str) -> Callable[[str], str] | None:
        """Return the function that seals the response's reasoning; None for a stored response, unless the request
        includes it."""
        if ENCRYPTED_CONTENT_INCLUDE not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self.load_sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=request.model, purpose="reasoning")

    async def unseal_request(
        self, request: CreateResponse, tenant: str
    ) -> tuple[CreateResponse, Sequence[InputTransformation]]:
        """Return the request with its reasoning unsealed, and the items that cannot be, which no model sees."""
        if not isinstance(request.input, list):
            return request, ()
        await end_pass(request.input)
        if not any(map(_is_sealed, request.input)):
            return request, ()
        items, removed = await _unseal_items(request.input, await self.load_sealer(), tenant, request.model)
        return request.model_copy(update={"input": items}), removed

    async def unseal_history(self, history: LoadedHistory, model: str, tenant: str) -> LoadedHistory:
        """Return the history with the reasoning unsealed that this model may read."""
        if not any(map(_is_sealed, history.items)):
            return history
        items, _ = await _unseal_items(history.items, await self.load_sealer(), tenant, model)
        return msgspec.structs.replace(history, items=items)

    async def load_sealer(self) -> Sealer:
        """Return the Sealer for everything that clients store for this server."""
        if self._sealer is None:
            key = generate_key()
            if await self._kv.write([Put(_KEY_RECORD, key, None, ABSENT)]) is None:
                entry = await self._kv.get(_KEY_RECORD)
                key = entry.value if entry is not None else key
            self._sealer = Sealer([key])
        return self._sealer


async def _unseal_items(
    input_items: Sequence[Item], sealer: Sealer, tenant: str, model: str
) -> tuple[list[Item], list[InputTransformation]]:
    """Return the items with their reasoning unsealed, and those that cannot be; many at turns of the tenant."""
    items: list[Item] = []
    removed: list[InputTransformation] = []

    def unseal(item: Item) -> None:
        if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
            items.append(item)
            return
        try:
            text = sealer.unseal(item.encrypted_content, tenant=tenant, model=model, purpose="reasoning")
        except UnsealError as exc:
            items.append(item)
            if not item.content:  # else the client also sent the plain text
                removed.append(
                    InputTransformation(id=item.id or "", action="removed", reason=exc.reason, type="reasoning")
                )
        else:
            content = [ReasoningText(type="reasoning_text", text=text)] if text else []
            items.append(item.model_copy(update={"content": content}))

    await do_in_turns(input_items, unseal, _UNSEAL_WORK)
    return items, removed


def _is_sealed(item: Item) -> bool:
    return isinstance(item, ReasoningItem) and item.encrypted_content is not None
