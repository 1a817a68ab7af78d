"""A real SMTP server (aiosmtpd) in the test's own event loop, with the e-mails that it has accepted."""

import asyncio
import ssl
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session


@dataclass
class Mailbox:
    """The accepted e-mails, each with the recipients of its envelope. `refusal` answers every e-mail instead,
    and `logins` are the accounts that were used."""

    port: int = 0
    refusal: str = ""
    mails: list[tuple[list[str], EmailMessage]] = field(default_factory=list[tuple[list[str], EmailMessage]])
    logins: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    unknown_recipients: set[str] = field(default_factory=set[str])
    refused_count: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, an e-mail waits for its answer."""

    def __post_init__(self) -> None:
        self.answering.set()

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if address in self.unknown_recipients:
            return "550 unknown"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd's name
        if self.refusal:
            self.refused_count += 1
            return self.refusal
        content = envelope.content
        assert isinstance(content, bytes)
        message: Any = message_from_bytes(content, policy=default)
        self.mails.append(([*envelope.rcpt_tos], message))
        self.arrived.set()
        await self.answering.wait()
        return "250 accepted"

    def log_in(self, _server: SMTP, _session: Session, _envelope: Envelope, _mechanism: str, login: Any) -> AuthResult:
        assert isinstance(login, LoginPassword)
        self.logins.append((login.login.decode(), login.password.decode()))
        return AuthResult(success=True)

    async def wait_for(self, count: int) -> None:
        """Return when that many e-mails have arrived."""
        async with asyncio.timeout(10):
            while len(self.mails) < count:
                self.arrived.clear()
                await self.arrived.wait()


@asynccontextmanager
async def serving_mail(
    box: Mailbox | None = None,
    *,
    starttls: ssl.SSLContext | None = None,
    tls: ssl.SSLContext | None = None,
    needs_login: bool = False,
) -> AsyncGenerator[Mailbox]:
    """Serve on all addresses of this machine, on the port of `box` where that is set."""
    mailbox, loop = box or Mailbox(), asyncio.get_running_loop()

    def build() -> SMTP:
        options: dict[str, Any] = {"auth_required": True, "authenticator": mailbox.log_in} if needs_login else {}
        with warnings.catch_warnings(action="ignore"):  # about passwords without TLS, which is what a test is about
            return SMTP(
                mailbox,
                hostname="mail.test",
                loop=loop,
                tls_context=starttls,
                auth_require_tls=starttls is not None,
                **options,
            )

    server = await loop.create_server(build, "0.0.0.0", mailbox.port, ssl=tls)
    mailbox.port = server.sockets[0].getsockname()[1]
    try:
        yield mailbox
    finally:
        server.close()
