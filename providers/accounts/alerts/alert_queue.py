"""AlertQueue: the job of looking for due alerts, which one process of all that share a store has, and of sending their
e-mails."""

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from email.errors import MessageError
from typing import Final

from apis.accounts.directory import Project
from apis.errors import StackError
from apis.storage.kv_store import KVStore
from apis.storage.lease import Lease
from apis.storage.records import decode_record
from providers.accounts.alerts.due_alerts import DueAlert, DueAlerts
from providers.accounts.alerts.message import MailError, MailService, build_message
from providers.accounts.records import ALERT_LEASE_KEY, project_key
from providers.common.jobs import Claim, JobRecord, LeaderQueue

_log = logging.getLogger(__name__)
_LEASE_S: Final = 10.0
"""Seconds after which another process goes on where the one that sends was killed."""
_NOTICE_TTL_S: Final = 60 * 24 * 3600.0
_MAX_SENDING: Final = 16
"""E-mails that are sent at a time; the others wait, so that a slow mail server holds no more connections."""
_MAX_PAUSE_S: Final = 900.0
"""The longest time between two attempts to send one e-mail."""
_MARK_INTERVAL_S: Final = 1.0
CLOSE_S: Final = 5.0
"""Seconds for which a process that ends waits for e-mails that are being sent."""


@dataclass(frozen=True, slots=True)
class _Retry:
    at: float
    pause_s: float


class AlertQueue(LeaderQueue):
    """One job, which is there as long as there are alerts. Its leader looks for due ones every `interval_s`.

    An e-mail is recorded as sent directly after the mail server has accepted it. A process that is killed in between
    leaves one that is sent again, with the same `Message-ID`.
    """

    title = "spend alerts"
    rest_factor = 10.0
    """Looking for very many alerts takes a tenth of the time."""

    def __init__(
        self,
        kv_store: KVStore,
        due_alerts: DueAlerts,
        service: MailService,
        interval_s: float,
        lease_s: float = _LEASE_S,
    ) -> None:
        super().__init__(kv_store, ALERT_LEASE_KEY, lease_s, interval_s)
        self._due = due_alerts
        self._service = service
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._retries: dict[str, _Retry] = {}

    async def is_needed(self) -> bool:
        return await self._due.exist()

    async def run(self, claim: Claim[None, JobRecord]) -> None:
        """Look for due alerts until there are none, or this process ends: then e-mails that the mail server has not
        accepted within seconds are left to other processes."""
        try:
            await super().run(claim)
        finally:
            await self._finish_sending()

    async def work(self, lease: Lease) -> None:
        due = {each.notice_key: each for each in await self._due.find(time.time())}
        lease.check()
        self._retries = {key: retry for key, retry in self._retries.items() if key in due}
        now = time.monotonic()
        for key, alert in due.items():
            retry = self._retries.get(key)
            is_waiting = retry is not None and now < retry.at
            if key not in self._sending and not is_waiting and len(self._sending) < _MAX_SENDING:
                pause_s = self._interval_s if retry is None else min(2 * retry.pause_s, _MAX_PAUSE_S)
                self._retries[key] = _Retry(now + pause_s, pause_s)
                self._sending[key] = task = asyncio.create_task(self._send(alert))
                task.add_done_callback(lambda _, key=key: self._sending.pop(key, None))

    async def _send(self, due: DueAlert) -> None:
        key, alert = due.notice_key, due.alert
        try:
            name = None if alert.project_id is None else await self._load_project_name(alert.project_id)
            await self._service.send(build_message(due, name, self._service))
        except (MailError, StackError) as exc:
            _log.warning("the spend alert %s was not sent and is tried again: %s", alert.id, exc)
            return
        except (ValueError, LookupError, TypeError, MessageError):  # what its texts are, they stay
            _log.exception("the spend alert %s cannot be written as an e-mail, and is not sent", alert.id)
            self._retries[key] = _Retry(math.inf, 0.0)
            return
        # a round that has read the store before the notice is there must not send it again
        self._retries[key] = _Retry(math.inf, 0.0)
        while True:
            try:
                await self.kv.put(key, b"%d" % time.time(), ttl_s=_NOTICE_TTL_S)
                break
            except StackError as exc:
                _log.warning("the spend alert %s was sent, which is not recorded yet: %s", alert.id, exc.message)
            await asyncio.sleep(_MARK_INTERVAL_S)
        _log.info("the spend alert %s was sent to %d recipients", alert.id, len(alert.recipients))

    async def _load_project_name(self, project_id: str) -> str | None:
        entry = await self.kv.get(project_key(project_id))
        return None if entry is None else decode_record(entry, Project).name

    async def _finish_sending(self) -> None:
        tasks = {*self._sending.values()}
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished)
