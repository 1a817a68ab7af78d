"""SpendAlerting: the alerts of a store, and the worker that sends them where the run config names a mail server."""

import logging
from typing import Any

from apis.imports import import_from_string
from apis.storage.kv_store import KVStore
from providers.accounts.alerts.alert_queue import CLOSE_S, AlertQueue
from providers.accounts.alerts.due_alerts import DueAlerts
from providers.accounts.alerts.message import MailService
from providers.accounts.alerts.settings import EmailConfig
from providers.accounts.alerts.stored_alerts import StoredSpendAlerts
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.usage_log import StoredUsageLog
from providers.common.jobs import JobRecord, LeasedJobs
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)


class SpendAlerting:
    """Without a mail server nothing is watched, and what is stored is only shown and deleted."""

    def __init__(
        self,
        kv_store: KVStore,
        audit_log: StoredAuditLog,
        usage_log: StoredUsageLog,
        *,
        email: EmailConfig | None,
        currency: str,
    ) -> None:
        self.alerts = StoredSpendAlerts(kv_store, audit_log, can_send=email is not None)
        self._due = DueAlerts(kv_store, usage_log)
        self._jobs: LeasedJobs[None, JobRecord] | None = None
        if email is not None:
            # only here: its library is a fiftieth of a second of every start
            mailer: Any = import_from_string("providers.accounts.alerts.mailer:Mailer")(email)
            service = MailService(mailer.send, email.sender, currency.upper())
            queue = AlertQueue(kv_store, self._due, service, email.check_interval_s)
            self._jobs = LeasedJobs(queue, WorkerSign(kv_store, queue.retry_s), poll_s=email.check_interval_s)

    async def start(self) -> None:
        """Begin to watch, or log that there are alerts and no mail server."""
        if self._jobs is not None:
            self._jobs.start()
        elif await self._due.exist():
            _log.warning("spend alerts are stored, but `accounts.email` names no mail server: none is sent")

    async def close(self) -> None:
        """Stop watching."""
        if self._jobs is not None:
            await self._jobs.close(2 * CLOSE_S)
