"""Reasoning on its way to a client that keeps it for us, and back."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from openai.types.responses.response import InputTransformation
from pydantic import SecretStr

from apis.responses import CreateResponse
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.wire.items import Item, ReasoningItem, ReasoningText
from providers.responses.context.sealing import Sealer, UnsealError, generate_key
from providers.responses.store.history_cache import LoadedHistory

ENCRYPTED_CONTENT_INCLUDE: Final = "reasoning.encrypted_content"
_KEY_RECORD: Final = "/reasoning-key"


class SealedReasoning:
    """Seals what leaves and opens what comes back. Without `keys`, with one that all workers on this store share: the
    first that needs it makes it."""

    def __init__(self, keys: Sequence[SecretStr], kv: KVStore) -> None:
        self._kv = kv
        self._sealer = Sealer([key.get_secret_value().encode() for key in keys]) if keys else None

    async def build_seal(self, request: CreateResponse, tenant: str) -> Callable[[str], str] | None:
        """What seals the response's reasoning, where the client asks for it or nobody else would keep it."""
        if ENCRYPTED_CONTENT_INCLUDE not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self.load_sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=request.model)

    async def unseal_request(
        self, request: CreateResponse, tenant: str
    ) -> tuple[CreateResponse, Sequence[InputTransformation]]:
        """The request with its sealed reasoning opened, and what of it says nothing here, which no model is shown."""
        if not isinstance(request.input, list) or not any(map(_is_sealed, request.input)):
            return request, ()
        items, removed = _unseal_items(request.input, await self.load_sealer(), tenant, request.model)
        return request.model_copy(update={"input": items}), removed

    async def unseal_history(self, history: LoadedHistory, model: str, tenant: str) -> LoadedHistory:
        """A conversation with what it was given sealed, opened as far as this model may know it."""
        if not any(map(_is_sealed, history.items)):
            return history
        return replace(history, items=_unseal_items(history.items, await self.load_sealer(), tenant, model)[0])

    async def load_sealer(self) -> Sealer:
        """What seals and opens here, whatever it is that clients keep."""
        if self._sealer is None:
            key = generate_key()
            if await self._kv.write([Put(_KEY_RECORD, key, None, ABSENT)]) is None:
                found = await self._kv.get(_KEY_RECORD)
                key = found.value if found is not None else key
            self._sealer = Sealer([key])
        return self._sealer


def _unseal_items(
    input_items: Sequence[Item], sealer: Sealer, tenant: str, model: str
) -> tuple[list[Item], list[InputTransformation]]:
    items: list[Item] = []
    removed: list[InputTransformation] = []
    for item in input_items:
        if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
            items.append(item)
            continue
        try:
            text = sealer.unseal(item.encrypted_content, tenant=tenant, model=model)
        except UnsealError as exc:
            items.append(item)
            if not item.content:  # else the client kept the thought itself as well
                removed.append(
                    InputTransformation(id=item.id or "", action="removed", reason=exc.reason, type="reasoning")
                )
        else:
            content = [ReasoningText(type="reasoning_text", text=text)] if text else []
            items.append(item.model_copy(update={"content": content}))
    return items, removed


def _is_sealed(item: Item) -> bool:
    return isinstance(item, ReasoningItem) and item.encrypted_content is not None
