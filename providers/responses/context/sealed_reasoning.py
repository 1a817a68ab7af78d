"""Reasoning on its way to a client that keeps it for us, and back."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from openai.types.responses.response import InputTransformation
from pydantic import SecretStr

from apis.responses import CreateResponse
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.wire.items import Item, ReasoningItem, ReasoningText
from providers.responses.context.sealing import CannotOpen, Sealer, new_key
from providers.responses.store.history_cache import Past

INCLUDED: Final = "reasoning.encrypted_content"
_KEY: Final = "/reasoning-key"


class KeptReasoning:
    """Seals what leaves and opens what comes back. Without `keys`, with one that all workers on this store share: the
    first that needs it makes it."""

    def __init__(self, keys: Sequence[SecretStr], kv: KVStore) -> None:
        self._kv = kv
        self._sealer = Sealer([key.get_secret_value().encode() for key in keys]) if keys else None

    async def sealing(self, request: CreateResponse, tenant: str) -> Callable[[str], str] | None:
        """What seals the response's reasoning, where the client asks for it or nobody else would keep it."""
        if INCLUDED not in (request.include or ()) and request.store is not False:
            return None
        sealer = await self.sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=request.model)

    async def opened(
        self, request: CreateResponse, tenant: str
    ) -> tuple[CreateResponse, Sequence[InputTransformation]]:
        """The request with its sealed reasoning opened, and what of it says nothing here, which no model is shown."""
        if not isinstance(request.input, list) or not any(map(_is_sealed, request.input)):
            return request, ()
        items, removed = _opened(request.input, await self.sealer(), tenant, request.model)
        return request.model_copy(update={"input": items}), removed

    async def opened_past(self, past: Past, model: str, tenant: str) -> Past:
        """A conversation with what it was given sealed, opened as far as this model may know it."""
        if not any(map(_is_sealed, past.items)):
            return past
        return replace(past, items=_opened(past.items, await self.sealer(), tenant, model)[0])

    async def sealer(self) -> Sealer:
        """What seals and opens here, whatever it is that clients keep."""
        if self._sealer is None:
            key = new_key()
            if await self._kv.write([Put(_KEY, key, None, ABSENT)]) is None:
                found = await self._kv.get(_KEY)
                key = found.value if found is not None else key
            self._sealer = Sealer([key])
        return self._sealer


def _opened(
    given: Sequence[Item], sealer: Sealer, tenant: str, model: str
) -> tuple[list[Item], list[InputTransformation]]:
    items: list[Item] = []
    removed: list[InputTransformation] = []
    for item in given:
        if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
            items.append(item)
            continue
        try:
            text = sealer.open(item.encrypted_content, tenant=tenant, model=model)
        except CannotOpen as exc:
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
