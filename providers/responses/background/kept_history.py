"""KeptHistory: the history of a background response, also after the response before it was deleted."""

from collections.abc import Mapping

from providers.responses.context.input_items import HistorySource
from providers.responses.store.history import History
from providers.responses.store.history_cache import LoadAllowance, LoadedHistory, TurnPosition
from providers.responses.store.item_lookup import FoundItem


class KeptHistory(HistorySource):
    """The stored responses, and the turn at `position`, which the background response keeps from its creation on."""

    def __init__(self, history: History, position: TurnPosition) -> None:
        self._history = history
        self._position = position
        self.max_bytes = history.max_bytes

    async def load_history(self, response_id: str, *, tenant: str, allowance: LoadAllowance) -> LoadedHistory:
        return await self._history.load_history(
            response_id, tenant=tenant, allowance=allowance, kept_position=self._position
        )

    async def find_items(
        self, params_by_id: Mapping[str, str], *, tenant: str, allowance: LoadAllowance
    ) -> dict[str, FoundItem]:
        return await self._history.find_items(params_by_id, tenant=tenant, allowance=allowance)
