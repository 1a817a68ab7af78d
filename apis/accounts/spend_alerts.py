"""Spend alerts: e-mails about the amount that a project, or all projects together, have spent in a month (UTC)."""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from apis.accounts.requests import AccountPage
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
