"""BackgroundObservation: background responses as operators and the built-in page see them while they run."""

from collections.abc import Awaitable, Callable, Sequence

from openai.types.responses import Response

from apis.events import ResponseEvent
from apis.observation.background import BackgroundOverview, EventListParams, Observation, WorkerSummary
from apis.storage.kv_store import KVStore
from apis.storage.pages import Page
from providers.responses.background.event_log import EventLog
from providers.responses.background.event_pages import read_event_page
from providers.responses.background.run_summaries import summarize_runs
from providers.responses.background.worker_registry import WorkerRegistry
from providers.responses.background.workers import BackgroundConfig
from providers.responses.context.item_views import ItemViews


class BackgroundObservation(Observation):
    """Reads of one store. `load_response` returns the stored response of an id and a tenant, or raises NotFound."""

    def __init__(
        self,
        kv: KVStore,
        config: BackgroundConfig,
        event_log: EventLog,
        registry: WorkerRegistry,
        load_response: Callable[[str, str], Awaitable[Response]],
        views: ItemViews,
    ) -> None:
        self._kv = kv
        self._config = config
        self._event_log = event_log
        self._registry = registry
        self._load_response = load_response
        self._views = views

    async def list_events(self, response_id: str, params: EventListParams, *, tenant: str) -> Page[ResponseEvent]:
        response = await self._load_response(response_id, tenant)
        view = await self._views.of_response(params.include or (), response, tenant)
        await self._event_log.add_reader(response_id, tenant=tenant)
        page = await read_event_page(self._kv, tenant, response_id, params)
        return Page(view.show_events(page.data), page.has_more, page.last_id)

    async def list_runs(self, *, tenant: str) -> BackgroundOverview:
        return await summarize_runs(self._kv, tenant, self._config)

    async def list_workers(self) -> Sequence[WorkerSummary]:
        return await self._registry.list_workers()
