"""DueAlerts: the alerts whose threshold has been reached and whose e-mail was not sent yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from apis.accounts.limits import NANOS_PER_CENT
from apis.accounts.spend_alerts import SpendAlert
from apis.storage.kv_store import KVStore
from providers.accounts.alerts.months import Month, MonthSums
from providers.accounts.alerts.stored_alerts import AlertList
from providers.accounts.records import ORGANIZATION_ID, alert_notices_prefix, alerts_key
from providers.accounts.usage_log import StoredUsageLog
from providers.common.state.scan import scan_records

_GRACE_S: Final = 3 * 24 * 3600
"""Seconds after a month in which its alerts are sent: it may end before a worker looks, or while a mail server is
down."""
_PAGE_RECORDS: Final = 50


@dataclass(frozen=True, slots=True)
class DueAlert:
    """An alert in a month in which `spent` (NANOS) has reached its threshold."""

    alert: SpendAlert
    month: Month
    spent: int = 0

    @property
    def notice_key(self) -> str:
        """The key that exists once the e-mail was sent."""
        alert = self.alert
        prefix = alert_notices_prefix(alert.project_id or ORGANIZATION_ID, alert.id)
        return f"{prefix}{self.month.name}/{alert.threshold_amount}"


class DueAlerts:
    """Compares the alerts in the store with the sums of the usage log, which are read only if an alert is waiting."""

    def __init__(self, kv_store: KVStore, usage_log: StoredUsageLog) -> None:
        self._kv = kv_store
        self._sums = MonthSums(usage_log)

    async def exist(self) -> bool:
        """Return true if there are any alerts, in one read of one entry."""
        return bool(await self._kv.scan(alerts_key(""), limit=1))

    async def find(self, now: float) -> list[DueAlert]:
        """Return the due alerts at a time, those of the month before included until their time to be sent ends."""
        months = [Month.at(now)]
        if now < months[0].start + _GRACE_S:
            months.append(Month.at(months[0].start - 1))
        waiting = await self._find_waiting(months)
        if not waiting:
            return []
        spent = {month: await self._sums.read(month, now) for month in {each.month for each in waiting}}
        due = [DueAlert(each.alert, each.month, spent[each.month].get(each.alert.project_id, 0)) for each in waiting]
        return [each for each in due if each.spent >= each.alert.threshold_amount * NANOS_PER_CENT]

    async def _find_waiting(self, months: Sequence[Month]) -> list[DueAlert]:
        """Return the alerts whose e-mail for one of the months was not sent yet."""
        waiting: list[DueAlert] = []
        async for stored in scan_records(self._kv, alerts_key(""), AlertList, page_size=_PAGE_RECORDS):
            armed = [
                DueAlert(alert, month) for alert in stored.record for month in months if alert.armed_at < month.end
            ]
            notices = await self._kv.get_many([each.notice_key for each in armed]) if armed else ()
            waiting += [each for each, notice in zip(armed, notices, strict=True) if notice is None]
        return waiting
