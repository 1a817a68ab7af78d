"""Mailer: sends an e-mail through the mail server of the run config."""

import asyncio
import logging
from email.message import EmailMessage
from typing import Final

import aiosmtplib

from apis.certificates import trusted_certificates
from providers.accounts.alerts.message import MailError
from providers.accounts.alerts.settings import EmailConfig

_log = logging.getLogger(__name__)
_MAX_REASON_CHARS: Final = 300


class Mailer:
    """One connection for each e-mail: alerts are rare, and mail servers close connections that wait."""

    def __init__(self, config: EmailConfig) -> None:
        self._server = config.find_server()
        self._sender = config.sender
        self._timeout_s = config.timeout_s

    async def send(self, message: EmailMessage) -> None:
        """Send the e-mail to all recipients that the server accepts, within the time-out. Raises MailError if it has
        accepted none, or did not answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (aiosmtplib.SMTPException, OSError) as exc:  # a TimeoutError is an OSError
            raise MailError(repr(exc)[:_MAX_REASON_CHARS]) from exc

    async def _send(self, message: EmailMessage) -> None:
        server = self._server
        needs_certificates = server.is_tls or server.needs_starttls
        client = aiosmtplib.SMTP(
            hostname=server.host,
            port=server.port,
            username=server.username,
            password=server.password,
            use_tls=server.is_tls,
            start_tls=server.needs_starttls,
            tls_context=await asyncio.to_thread(trusted_certificates, "smtp") if needs_certificates else None,
            # a name that mail servers accept, which that of a container is not
            local_hostname=self._sender.partition("@")[2],
            timeout=self._timeout_s,
        )
        try:
            await client.connect()
            refusals, _ = await client.send_message(message)
            if refusals:
                codes = ", ".join(sorted({str(refusal.code) for refusal in refusals.values()}))
                _log.warning("the mail server refused %d recipients (%s)", len(refusals), codes)
        finally:
            client.close()  # without QUIT, whose failure would say nothing about the e-mail
