"""SpendAlerts: e-mails about the amount that a project, or all projects together, have spent in a month (UTC)."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from apis.accounts.directory import AccountPage
from apis.accounts.spending import UpdateSpendLimit
from apis.wire.base import Wire

MAX_SPEND_ALERTS: Final = 100
"""Alerts of one project, and of all projects together."""
MAX_RECIPIENTS: Final = 100
_MAX_ADDRESS_CHARS: Final = 254
_ADDRESS: Final = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
"""An address without quotes and comments, in ASCII (RFC 5321, section 4.1.2). No character of it ends a header."""
_MAX_LOCAL_CHARS: Final = 64


def _check_address(address: str) -> str:
    if len(address) > _MAX_ADDRESS_CHARS or not _ADDRESS.fullmatch(address) or address.find("@") > _MAX_LOCAL_CHARS:
        raise ValueError("must be an e-mail address in ASCII, such as team@example.org")
    return address


def _check_prefix(prefix: str) -> str:
    if not prefix.isprintable():
        raise ValueError("must be one line of printable characters")
    if "=?" in prefix:  # mail libraries decode what follows, line breaks included
        raise ValueError("must not contain '=?', with which an encoded word of a header begins")
    return prefix


EmailAddress = Annotated[str, AfterValidator(_check_address)]
"""An e-mail address in ASCII; a domain of other characters is in the form of IDNA (`xn--`)."""


class NotificationChannel(Wire):
    """The recipients of an alert, and the text with which the subject of its e-mails begins."""

    type: Literal["email"]
    recipients: list[EmailAddress] = Field(min_length=1, max_length=MAX_RECIPIENTS)
    subject_prefix: Annotated[str, AfterValidator(_check_prefix)] | None = Field(default=None, max_length=128)


class SaveSpendAlert(UpdateSpendLimit):
    """Body that creates an alert or replaces its fields; `threshold_amount` is in cents."""

    notification_channel: NotificationChannel


class SpendAlertPage(AccountPage):
    """Query of the listing of alerts."""

    before: str | None = Field(default=None, max_length=256)
    order: Literal["asc", "desc"] = "asc"


@dataclass(frozen=True, slots=True)
class SpendAlert:
    """An alert of one project, or of all projects together where `project_id` is None. `threshold_amount` is in cents,
    and `armed_at` is when it was set (seconds of Unix time)."""

    id: str
    project_id: str | None
    threshold_amount: int
    recipients: tuple[str, ...]
    subject_prefix: str | None
    armed_at: int


class SpendAlerts(ABC):
    """The alerts in the store. `project_id` is None for those of all projects together.

    An e-mail is sent once for each alert, month and threshold over all workers and machines; twice only where the
    worker that sent it was killed, or could not reach the store, before it had recorded that. A mail server that
    cannot be reached, or refuses, is tried again until three days after the month. What is reserved is not spent.

    Every method raises NotFound for a project that does not exist, and StoreUnavailable.
    """

    @property
    @abstractmethod
    def can_send(self) -> bool:
        """True if the run config names a mail server."""

    @abstractmethod
    async def create(self, project_id: str | None, request: SaveSpendAlert) -> SpendAlert:
        """Create an alert, which is sent within seconds if its threshold has been reached already. Raises Unsupported
        without a mail server, and InvalidRequest if the project is archived or has MAX_SPEND_ALERTS."""

    @abstractmethod
    async def list(self, project_id: str | None) -> Sequence[SpendAlert]:
        """Return all alerts of the project, oldest first."""

    @abstractmethod
    async def get(self, project_id: str | None, alert_id: str) -> SpendAlert:
        """Return an alert. Raises NotFound."""

    @abstractmethod
    async def update(self, project_id: str | None, alert_id: str, request: SaveSpendAlert) -> SpendAlert:
        """Replace the fields of an alert; another threshold may be sent in the same month. Raises NotFound, Unsupported
        without a mail server, and InvalidRequest if the project is archived."""

    @abstractmethod
    async def delete(self, project_id: str | None, alert_id: str) -> None:
        """Delete an alert. Raises NotFound."""
