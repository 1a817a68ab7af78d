"""The one process that sends: rounds that overlap with an e-mail, and a lease that is lost."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from apis.accounts.spend_alerts import SpendAlert
from apis.accounts.usage import UsageEntry
from apis.storage.kv_store import Delete, KVStore
from apis.storage.records import encode_record
from providers.accounts.alerts.alert_queue import AlertQueue
from providers.accounts.alerts.due_alerts import DueAlerts
from providers.accounts.alerts.mailer import Mailer
from providers.accounts.alerts.message import MailService
from providers.accounts.alerts.settings import EmailConfig
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.prices import Prices
from providers.accounts.records import ALERT_LEASE_KEY, alerts_key
from providers.accounts.usage_log import StoredUsageLog
from providers.common.jobs import LeasedJobs
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory
from tests.support.servers.mail_server import Mailbox, serving_mail
from tests.support.waiting import until

ALERT = SpendAlert("alert_1", None, 0, ("team@example.org",), None, 0)


class SlowUsageLog(StoredUsageLog):
    """The usage log of a store that answers once `answering` is set."""

    def __init__(self, kv_store: KVStore, ledger: StoredLedger) -> None:
        super().__init__(kv_store, ledger)
        self.answering = asyncio.Event()
        self.answering.set()
        self.waiting = asyncio.Event()

    async def read(self, start_time: int, end_time: int) -> list[UsageEntry]:
        self.waiting.set()
        await self.answering.wait()
        return await super().read(start_time, end_time)


@asynccontextmanager
async def watching(box: Mailbox, alert: SpendAlert = ALERT) -> AsyncGenerator[tuple[KVStore, SlowUsageLog]]:
    kv = Memory(Memory.Config())
    await kv.start()
    log = SlowUsageLog(kv, StoredLedger(kv, Prices({}), 3600))
    await kv.put(alerts_key(".organization"), encode_record([replace(alert, armed_at=int(time.time()))]))
    email = EmailConfig.model_validate({"url": f"smtp://127.0.0.1:{box.port}", "sender": "stack@example.org"})
    queue = AlertQueue(kv, DueAlerts(kv, log), MailService(Mailer(email).send, email.sender, "USD"), 0.04, lease_s=0.6)
    watcher = LeasedJobs(queue, WorkerSign(kv, 0.6), poll_s=0.04)
    watcher.start()
    try:
        yield kv, log
    finally:
        log.answering.set()
        await watcher.close(10)
        await kv.close()


async def test_a_round_that_read_the_store_before_an_email_was_recorded_does_not_send_it_again() -> None:
    async with serving_mail() as box, watching(box) as (kv, log):
        box.answering.clear()
        await box.wait_for(1)
        log.answering.clear()
        log.waiting.clear()
        async with asyncio.timeout(5):
            await log.waiting.wait()  # the next round has seen that there is no notice
        box.answering.set()
        await until(lambda: kv.scan("/accounts/alert_notices/"))
        log.answering.set()
        await asyncio.sleep(0.2)
        assert len(box.mails) == 1


async def test_a_process_that_has_lost_the_lease_sends_nothing_until_it_has_it_again() -> None:
    async with serving_mail() as box, watching(box) as (kv, log):
        log.answering.clear()
        async with asyncio.timeout(5):
            await log.waiting.wait()
        entry = await kv.get(ALERT_LEASE_KEY)
        assert entry is not None
        await kv.write([Delete(ALERT_LEASE_KEY, entry.version)])
        await kv.put(ALERT_LEASE_KEY, b" other 1", ttl_s=0.8)
        await asyncio.sleep(0.3)  # a renewal later
        log.answering.set()
        await asyncio.sleep(0.2)
        assert box.mails == []
        await box.wait_for(1)


async def test_an_encoded_word_in_a_subject_is_text() -> None:
    """An alert that was stored before such a prefix was refused adds no header and no body."""
    injected = "=?utf-8?q?x=0d=0aBcc:_y@evil=0d=0a=0d=0abody?="
    async with serving_mail() as box, watching(box, replace(ALERT, subject_prefix=injected)):
        await box.wait_for(1)
    [(recipients, message)] = box.mails
    assert recipients == ["team@example.org"]
    assert message["Bcc"] is None
    assert "Bcc" in message["Subject"]
    assert message.get_content().startswith("Since ")


async def test_an_alert_that_cannot_be_written_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    """It does not stop those that can, and is not tried for ever."""
    broken = replace(ALERT, recipients=("a@example.org\r\nBcc: b@example.org",))
    async with serving_mail() as box, watching(box, broken) as (_, log):
        for _ in range(3):
            log.waiting.clear()
            async with asyncio.timeout(5):
                await log.waiting.wait()
    assert box.mails == []
    assert [record.message for record in caplog.records].count(
        "the spend alert alert_1 cannot be written as an e-mail, and is not sent"
    ) == 1
