"""StoredSpendAlerts: the alerts of each project in one record of the KVStore."""

import builtins
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from apis.accounts.directory import Project
from apis.accounts.spend_alerts import MAX_SPEND_ALERTS, SaveSpendAlert, SpendAlert
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.storage.keys import MAX_RECORD_ID_CHARS, new_id_key
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, delete_all, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import (
    ORGANIZATION_ID,
    alert_notices_prefix,
    alerts_key,
    load_project_with,
    require_active,
)
from providers.common.state.change import write_prepared

AlertList = list[SpendAlert]


class StoredSpendAlerts:
    """The alerts in the store. `project_id` is None for those of all projects together. A record is absent where there
    are no alerts, so that one read shows that there is nothing to watch.

    An e-mail is sent once for each alert, month and threshold over all workers and machines; twice only where the
    worker that sent it was killed, or could not reach the store, before it had recorded that. A mail server that
    cannot be reached, or refuses, is tried again until three days after the month. What is reserved is not spent.

    Every method raises NotFound for a project that does not exist, and StoreUnavailable.
    """

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog, *, can_send: bool) -> None:
        self._kv = kv_store
        self._audit = audit_log
        self._can_send = can_send

    @property
    def can_send(self) -> bool:
        """True if the run config names a mail server."""
        return self._can_send

    async def create(self, project_id: str | None, request: SaveSpendAlert) -> SpendAlert:
        """Create an alert, which is sent within seconds if its threshold has been reached already. Raises Unsupported
        without a mail server, and InvalidRequest if the project is archived or has MAX_SPEND_ALERTS."""
        self._require_mail_server()
        alert = _to_alert(f"alert_{new_id_key()}", project_id, request)

        def add(alerts: AlertList) -> None:
            if len(alerts) >= MAX_SPEND_ALERTS:
                raise InvalidRequest(
                    f"There are {MAX_SPEND_ALERTS} spend alerts already: delete one first.", code="too_many_alerts"
                )
            alerts.append(alert)

        await self._change(project_id, alert.id, add, request.model_dump())
        return alert

    async def list(self, project_id: str | None) -> builtins.list[SpendAlert]:
        """Return all alerts of the project, oldest first."""
        return read_alerts((await self._load(project_id))[1])

    async def get(self, project_id: str | None, alert_id: str) -> SpendAlert:
        """Return an alert. Raises NotFound."""
        alerts = await self.list(project_id)
        return alerts[_find_alert(alerts, alert_id)]

    async def update(self, project_id: str | None, alert_id: str, request: SaveSpendAlert) -> SpendAlert:
        """Replace the fields of an alert; another threshold may be sent in the same month. Raises NotFound, Unsupported
        without a mail server, and InvalidRequest if the project is archived."""
        self._require_mail_server()
        updated = _to_alert(alert_id, project_id, request)

        def put(alerts: AlertList) -> None:
            nonlocal updated
            position = _find_alert(alerts, alert_id)
            if alerts[position].threshold_amount == updated.threshold_amount:
                updated = replace(updated, armed_at=alerts[position].armed_at)
            alerts[position] = updated

        await self._change(project_id, alert_id, put, request.model_dump())
        return updated

    async def delete(self, project_id: str | None, alert_id: str) -> None:
        """Delete an alert. Raises NotFound."""

        def remove(alerts: AlertList) -> None:
            del alerts[_find_alert(alerts, alert_id)]

        await self._change(project_id, alert_id, remove, None)
        await delete_all(self._kv, alert_notices_prefix(project_id or ORGANIZATION_ID, alert_id))

    def _require_mail_server(self) -> None:
        if not self._can_send:
            raise Unsupported(
                "Spend alerts are sent by e-mail: set `accounts.email` in the run config, with `url` and `sender`.",
                code="not_configured",
            )

    async def _change(
        self,
        project_id: str | None,
        alert_id: str,
        change: Callable[[AlertList], None],
        requested: dict[str, Any] | None,
    ) -> None:
        """Store the alerts as `change` leaves them, with a record of what was requested; None stands for a deletion.
        Raises NotFound, InvalidRequest and Overloaded."""
        key = alerts_key(project_id or ORGANIZATION_ID)
        event = "organization.updated" if project_id is None else "project.updated"

        async def prepare() -> list[Op]:
            project, entry = await self._load(project_id)
            if requested is not None and project is not None:
                require_active(project)
            alerts = read_alerts(entry)
            change(alerts)
            version = ABSENT if entry is None else entry.version
            op = Put(key, encode_record(alerts), expect=version) if alerts else Delete(key, version)
            return [op, self._audit.put(event, alert_id, project, {"changes_requested": {"spend_alert": requested}})]

        await write_prepared(self._kv, prepare)

    async def _load(self, project_id: str | None) -> tuple[Project | None, Entry | None]:
        if project_id is None:
            return None, await self._kv.get(alerts_key(ORGANIZATION_ID))
        project, alerts = await load_project_with(self._kv, project_id, alerts_key)
        return decode_record(project, Project), alerts


def read_alerts(entry: Entry | None) -> AlertList:
    """Return the alerts in the record of a project, oldest first. Raises StorageCorrupt."""
    return [] if entry is None else decode_record(entry, AlertList)


def _to_alert(alert_id: str, project_id: str | None, request: SaveSpendAlert) -> SpendAlert:
    channel = request.notification_channel
    return SpendAlert(
        id=alert_id,
        project_id=project_id,
        threshold_amount=request.threshold_amount,
        recipients=tuple(channel.recipients),
        subject_prefix=channel.subject_prefix,
        armed_at=int(time.time()),
    )


def _find_alert(alerts: AlertList, alert_id: str) -> int:
    position = next((index for index, alert in enumerate(alerts) if alert.id == alert_id), None)
    if position is None:
        raise NotFound(f"No spend alert found with id '{alert_id[:MAX_RECORD_ID_CHARS]}'.")
    return position
