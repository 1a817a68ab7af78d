"""The e-mail of an alert, and the service that sends it."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate

from apis.accounts.limits import NANOS
from providers.accounts.alerts.due_alerts import DueAlert


class MailError(Exception):
    """The mail server did not accept the e-mail; the message is for the log."""


@dataclass(frozen=True, slots=True)
class MailService:
    """The function that sends one e-mail, the sender of all, and the currency of their amounts."""

    send: Callable[[EmailMessage], Awaitable[None]]
    sender: str
    currency: str


def build_message(due: DueAlert, project_name: str | None, service: MailService) -> EmailMessage:
    """Return the e-mail that says which threshold has been reached. Its `Message-ID` is the same for each attempt, so
    that a mail program shows a copy once."""
    alert, month, currency = due.alert, due.month.name, service.currency
    threshold = f"{alert.threshold_amount / 100:.2f} {currency}"
    spender = "all projects together have" if alert.project_id is None else f"the project {alert.project_id} has"
    message = EmailMessage(SMTP)
    message["From"] = service.sender
    message["To"] = ", ".join(dict.fromkeys(alert.recipients))
    subject = f"Spend alert: {spender} spent {threshold} in {month}"
    prefix = (alert.subject_prefix or "").replace("=?", "= ?")  # the library would decode it, line breaks included
    message["Subject"] = f"{prefix} {subject}".strip()
    message["Date"] = formatdate()
    digest = hashlib.sha256(due.notice_key.encode()).hexdigest()[:32]  # short, so that the header is one line
    message["Message-ID"] = f"<{digest}@{service.sender.partition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no absence notes in return
    name = f' ("{" ".join(project_name.split())}")' if project_name else ""
    message.set_content(
        f"Since {month}-01 00:00 UTC {spender} spent {due.spent / NANOS:.2f} {currency}{name}.\n"
        f"The alert {alert.id} was set to {threshold}. It refuses no requests: a spend limit does.\n"
    )
    return message
