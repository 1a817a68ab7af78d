"""StoredWebhooks: webhooks of the run config and of tenants, whose events wait in the KVStore for any worker."""

from collections.abc import Mapping, Sequence

from pydantic import Field, field_validator

from apis.documents.fetcher import Fetcher
from apis.fair_share import ONE_TENANT, Tenants
from apis.observation.details import DeliverySummary
from apis.storage.kv_store import KVStore, Op
from apis.webhooks import Webhooks
from providers.common.state.worker_signs import WorkerSign
from providers.webhooks.endpoints import DEFAULT_OPTIONS, StoredWebhookEndpoints, WebhookEndpointOptions
from providers.webhooks.queue import WebhookQueue
from providers.webhooks.receivers import Webhook


class StoredWebhooks(Webhooks):
    """Webhooks over one store. `endpoints` are those that tenants manage, None where the run config names all."""

    class Config(Webhooks.Config):
        """`receivers` are the webhooks that the operator names, and `endpoints` bounds those that tenants create. A
        process that gives no sign of life within `lease_s` is one of the three that a delivery may cost."""

        receivers: list[Webhook] = Field(default_factory=list[Webhook])
        endpoints: WebhookEndpointOptions = DEFAULT_OPTIONS
        lease_s: float = Field(default=10, gt=0, le=60)

        @field_validator("receivers")
        @classmethod
        def _check_receivers(cls, receivers: list[Webhook]) -> list[Webhook]:
            """Refuse two receivers with one queue."""
            queues: set[str] = set()
            for position, receiver in enumerate(receivers):
                if receiver.queue_name in queues:
                    raise ValueError(
                        f"[{position}] has the tenant and the url of one before it: name all events in one receiver"
                    )
                queues.add(receiver.queue_name)
            return receivers

    def __init__(self, config: Config, kv_store: KVStore, fetcher: Fetcher, tenants: Tenants = ONE_TENANT) -> None:
        self._sign = WorkerSign(kv_store, config.lease_s)
        self._queue = WebhookQueue(kv_store, config.receivers, fetcher, self._sign, tenants, config.endpoints)
        self.endpoints: StoredWebhookEndpoints | None = (
            self._queue.endpoints if config.endpoints.max_per_tenant else None
        )

    async def start(self) -> None:
        self._sign.start()
        self._queue.start()

    async def close(self) -> None:
        await self._queue.close()
        await self._sign.close()

    async def event_ops(
        self, event: str, object_id: str, tenant: str, data: Mapping[str, object] | None = None
    ) -> list[Op]:
        return await self._queue.event_ops(event, object_id, tenant, data)

    def wake(self, ops: Sequence[Op]) -> None:
        self._queue.wake(ops)

    async def list_deliveries(self, object_id: str, *, tenant: str) -> Sequence[DeliverySummary]:
        return await self._queue.log.list_deliveries(object_id, tenant=tenant)

    async def forget_deliveries(self, object_id: str, *, tenant: str) -> None:
        await self._queue.log.delete(object_id, tenant=tenant)
