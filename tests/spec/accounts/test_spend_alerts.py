"""Spend alerts through the SDK, with a real SMTP server: one e-mail for each alert, month and threshold."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from openai.types.admin.organization import OrganizationSpendAlert, OrganizationSpendAlertDeleted
from openai.types.admin.organization.projects import ProjectSpendAlert, ProjectSpendAlertDeleted

from apis.storage.lease import Lease
from providers.accounts.records import ALERT_LEASE_KEY
from tests.support.sdk.client import sdk_client
from tests.support.servers.mail_server import Mailbox, serving_mail
from tests.support.servers.serving import Served, scripted, serving
from tests.support.tenants.accounts import ROOT, new_project, organization_of
from tests.support.waiting import until

USED = {"input_tokens": 1000, "cached_tokens": 0, "output_tokens": 1000}
COST_CENTS = 500
"""The cost of one response with the usage USED."""
SENDER = "stack@example.org"
TO = "team@example.org"


def alert(threshold: int, *recipients: str, **channel: Any) -> dict[str, Any]:
    """The fields of an alert."""
    channel = {"type": "email", "recipients": [*recipients] or [TO], **channel}
    return {"currency": "USD", "interval": "month", "threshold_amount": threshold, "notification_channel": channel}


@asynccontextmanager
async def alerting(
    box: Mailbox | None, kv_store: Mapping[str, Any] | None = None, *, interval_s: float = 0.04
) -> AsyncGenerator[Served]:
    """Serve a stack whose alerts go to the mail server, None for a run config without one."""
    stored: dict[str, Any] = {"provider": "stored", "prices": {"scripted": {"input": 1000, "output": 4000}}}
    if box is not None:
        url = f"smtp://127.0.0.1:{box.port}"
        stored["email"] = {"url": url, "sender": SENDER, "check_interval_s": interval_s, "timeout_s": 5}
    accounts = {"provider": "chain", "providers": {"config": {"provider": "config"}, "stored": stored}}
    inference = scripted([{"text": "hello"}, {"finish": "stop", "usage": USED}])
    async with serving(
        inference, kv_store=kv_store, more={"accounts": accounts}, server={"api_keys": [ROOT]}
    ) as served:
        yield served


async def spend(served: Served, key: str) -> None:
    async with sdk_client(served.url, key) as client:
        await client.responses.create(model="scripted", input="hi")


async def refusal_of(call: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as refusal:
        await call
    return refusal.value


async def test_two_stacks_with_one_store_send_each_alert_once(tmp_path: Path) -> None:
    shared = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving_mail() as box, alerting(box, shared) as one, alerting(box, shared) as other:
        organization = organization_of(one.client)
        project_id, key = await new_project(organization)
        alerts = organization.projects.spend_alerts
        own = await alerts.create(project_id, **alert(500, "a@example.org", "b@example.org", subject_prefix="[Größe]"))
        ProjectSpendAlert.model_validate(own.to_dict(), strict=True)
        all_together = await organization.spend_alerts.create(**alert(900))
        OrganizationSpendAlert.model_validate(all_together.to_dict(), strict=True)
        await alerts.create(project_id, **alert(10_000))
        await asyncio.sleep(0.1)
        assert box.mails == []
        box.answering.clear()
        await spend(one, key)
        await box.wait_for(1)
        await asyncio.sleep(0.6)  # in which the other stack looks too
        assert len(box.mails) == 1
        box.answering.set()
        await spend(other, key)
        await box.wait_for(2)
        await asyncio.sleep(0.2)
        month = time.strftime("%Y-%m", time.gmtime())
        (recipients, mail), (all_recipients, mail_of_all) = box.mails
        assert recipients == ["a@example.org", "b@example.org"]
        assert (mail["From"], mail["To"]) == (SENDER, "a@example.org, b@example.org")
        assert mail["Subject"] == f"[Größe] Spend alert: the project {project_id} has spent 5.00 USD in {month}"
        assert re.fullmatch(r"<[0-9a-f]{32}@example\.org>", mail["Message-ID"])
        assert "5.00 USD" in mail.get_content()
        assert '("p")' in mail.get_content()
        assert all_recipients == [TO]
        assert mail_of_all["Subject"] == f"Spend alert: all projects together have spent 9.00 USD in {month}"
        assert "10.00 USD" in mail_of_all.get_content()


async def test_a_new_threshold_is_sent_too_and_a_deleted_alert_is_not() -> None:
    async with serving_mail() as box, alerting(box) as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization)
        alerts = organization.projects.spend_alerts
        await spend(served, key)
        alert_created = await alerts.create(project_id, **alert(300))
        await box.wait_for(1)  # it was reached already
        assert (
            await alerts.update(alert_created.id, project_id=project_id, **alert(300, "b@example.org"))
        ).id == alert_created.id
        await asyncio.sleep(0.2)
        assert len(box.mails) == 1
        await alerts.update(alert_created.id, project_id=project_id, **alert(400, "b@example.org"))
        await box.wait_for(2)
        assert box.mails[1][0] == ["b@example.org"]
        alert_now = await alerts.retrieve(alert_created.id, project_id=project_id)
        assert (alert_now.threshold_amount, alert_now.notification_channel.recipients) == (400, ["b@example.org"])
        waiting = await alerts.create(project_id, **alert(800))
        await alerts.update(waiting.id, project_id=project_id, **alert(900))
        for each in (alert_created, waiting):
            deleted = await alerts.delete(each.id, project_id=project_id)
            ProjectSpendAlertDeleted.model_validate(deleted.to_dict(), strict=True)
            with pytest.raises(NotFoundError):
                await alerts.retrieve(each.id, project_id=project_id)
            with pytest.raises(NotFoundError):
                await alerts.delete(each.id, project_id=project_id)
        await spend(served, key)
        await asyncio.sleep(0.2)
        assert len(box.mails) == 2
        assert await served.stack.kv_store.scan("/accounts/alert") == []  # nothing is watched any more
        of_all = await organization.spend_alerts.create(**alert(10**9))
        deleted = await organization.spend_alerts.delete(of_all.id)
        OrganizationSpendAlertDeleted.model_validate(deleted.to_dict(), strict=True)
        records = [each async for each in organization.audit_logs.list(resource_ids=[alert_created.id])]
        requested: Any = [each.project_updated.changes_requested.to_dict()["spend_alert"] for each in records]
        assert [each and each["threshold_amount"] for each in requested] == [None, 400, 300, 300]
        records = [each async for each in organization.audit_logs.list(event_types=["organization.updated"])]
        assert [each.organization_updated.id for each in records] == [of_all.id, of_all.id]


async def test_a_mail_server_that_refuses_or_is_absent_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    box = Mailbox(refusal="451 later")
    async with serving_mail(box):
        pass
    caplog.set_level(logging.WARNING)
    async with alerting(box) as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization)
        await organization.projects.spend_alerts.create(project_id, **alert(0))
        await until(lambda: caplog.text.count("was not sent") >= 2)
        await spend(served, key)  # meanwhile all else goes on
        async with serving_mail(box):
            await until(lambda: box.refused_count)
            box.refusal = ""
            await box.wait_for(1)
            await asyncio.sleep(0.2)
            assert len(box.mails) == 1
        assert "451" in caplog.text
        assert TO not in caplog.text


async def test_an_alert_that_a_killed_process_had_claimed_is_sent_when_its_claim_has_expired() -> None:
    async with serving_mail() as box, alerting(box) as served:
        killed = Lease(served.stack.kv_store, ALERT_LEASE_KEY, 0.5)
        assert await killed.acquire() is not None
        await organization_of(served.client).spend_alerts.create(**alert(0))
        await asyncio.sleep(0.3)
        assert box.mails == []
        await box.wait_for(1)
        await asyncio.sleep(0.2)
        assert len(box.mails) == 1


async def test_a_slow_mail_server_gets_one_copy_also_across_a_restart(tmp_path: Path) -> None:
    """The stack ends while the mail server has the e-mail and has not answered: it waits for the answer."""
    shared = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving_mail() as box:
        box.answering.clear()
        async with alerting(box, shared) as served:
            await organization_of(served.client).spend_alerts.create(**alert(0))
            await box.wait_for(1)
            await asyncio.sleep(0.3)  # many rounds
            asyncio.get_running_loop().call_later(0.3, box.answering.set)
        async with alerting(box, shared) as served:
            await asyncio.sleep(0.3)
            assert len(await served.stack.kv_store.scan("/accounts/alert_notices/")) == 1
        assert len(box.mails) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    (alert(1, "a@example.org\r\nBcc: b@example.org"), "notification_channel.recipients[0]"),
    (alert(1, TO, "two words@example.org"), "notification_channel.recipients[1]"),
    (alert(1, "no-address"), "notification_channel.recipients[0]"),
    (alert(1, "a@example.org,b@example.org"), "notification_channel.recipients[0]"),
    (alert(1, f"{'a' * 65}@example.org"), "notification_channel.recipients[0]"),
    (alert(1, *(f"a{number}@example.org" for number in range(101))), "notification_channel.recipients"),
    ({**alert(1), "notification_channel": {"type": "email", "recipients": []}}, "notification_channel.recipients"),
    (alert(1, subject_prefix="a\r\nBcc: b@example.org"), "notification_channel.subject_prefix"),
    (alert(1, subject_prefix="a\u2028b"), "notification_channel.subject_prefix"),
    (alert(1, subject_prefix="=?utf-8?q?x=0d=0aBcc:_y@evil?="), "notification_channel.subject_prefix"),
    (alert(1, subject_prefix="a" * 129), "notification_channel.subject_prefix"),
    (alert(1, type="sms"), "notification_channel.type"),
    (alert(-1), "threshold_amount"),
    (alert(10**12 + 1), "threshold_amount"),
    ({**alert(1), "currency": "EUR"}, "currency"),
    ({**alert(1), "interval": "day"}, "interval"),
]


async def test_what_is_no_alert_is_refused_with_the_name_of_the_field_and_their_number_is_bounded() -> None:
    async with serving_mail() as box, alerting(box) as served:
        organization = organization_of(served.client)
        project_id, _ = await new_project(organization)
        alerts = organization.projects.spend_alerts
        first = await alerts.create(project_id, **alert(10**12))
        for fields, param in REFUSED:
            for call in (alerts.create(project_id, **fields), alerts.update(first.id, project_id=project_id, **fields)):
                assert (await refusal_of(call)).param == param
        ids = [first.id] + [(await alerts.create(project_id, **alert(10**12))).id for _ in range(99)]
        assert (await refusal_of(alerts.create(project_id, **alert(1)))).code == "too_many_alerts"
        assert [each.id async for each in alerts.list(project_id)] == ids
        assert [each.id async for each in alerts.list(project_id, order="desc", limit=30)] == ids[::-1]
        page = await alerts.list(project_id, after=ids[2], limit=3)
        assert ([each.id for each in page.data], page.has_more) == (ids[3:6], True)
        assert [each.id for each in (await alerts.list(project_id, before=ids[6], limit=3)).data] == ids[3:6]
        assert (await organization.spend_alerts.list()).data == []
        with pytest.raises(NotFoundError):
            await alerts.retrieve(first.id, project_id="proj_none")
        with pytest.raises(NotFoundError):
            await organization.spend_alerts.retrieve(first.id)
        await organization.projects.archive(project_id)
        call = alerts.update(first.id, project_id=project_id, **alert(1))
        assert (await refusal_of(call)).code == "project_archived"
        assert (await alerts.delete(first.id, project_id=project_id)).deleted


async def test_without_a_mail_server_no_alert_is_created_and_those_of_before_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving_mail() as box, alerting(box, shared) as served:
        old = await organization_of(served.client).spend_alerts.create(**alert(10**9))
    async with alerting(None, shared) as served:
        alerts = organization_of(served.client).spend_alerts
        assert "none is sent" in caplog.text
        for call in (alerts.create(**alert(1)), alerts.update(old.id, **alert(1))):
            refusal = await refusal_of(call)
            assert (refusal.code, "accounts.email" in refusal.message) == ("not_configured", True)
        assert [each.id async for each in alerts.list()] == [old.id]
        assert (await alerts.delete(old.id)).deleted


async def test_a_chain_has_the_alerts_of_its_member_with_a_mail_server() -> None:
    async with serving_mail() as box:
        email = {"url": f"smtp://127.0.0.1:{box.port}", "sender": SENDER, "check_interval_s": 0.04}
        members = {"first": {}, "second": {"email": email}}
        providers = {name: {"provider": "stored", **fields} for name, fields in members.items()}
        accounts = {"provider": "chain", "providers": {"config": {"provider": "config"}, **providers}}
        async with serving(more={"accounts": accounts}, server={"api_keys": [ROOT]}) as served:
            await organization_of(served.client).spend_alerts.create(**alert(0))
            await box.wait_for(1)
