"""The mailer with a real SMTP server: nothing is sent in plain text to another machine, and no secret is shown."""

import ssl
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from providers.accounts.alerts.mailer import Mailer
from providers.accounts.alerts.message import MailError
from providers.accounts.alerts.settings import EmailConfig
from providers.accounts.organization import StoredProjectsConfig
from tests.support.servers.fetcher_hosts import certificate
from tests.support.servers.mail_server import serving_mail

HOST = "0.0.0.0"
"""It leads to this machine and is none of its loopback addresses."""
SENDER = "stack@example.org"


def config(url: str, **fields: Any) -> EmailConfig:
    return EmailConfig.model_validate({"url": url, "sender": SENDER, "timeout_s": 5, **fields})


def mail() -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = SENDER, "team@example.org", "hello"
    return message


async def server_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The context of a server with a certificate for HOST, and the certificate."""
    cert, key = await certificate(folder, f"mail.test,IP:{HOST}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert


async def test_an_account_is_used_after_starttls_with_a_trusted_certificate_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, cert = await server_context(tmp_path)
    async with serving_mail(starttls=context, needs_login=True) as box:
        mailer = Mailer(config(f"smtp://us%40er:pass%2Fword@{HOST}:{box.port}"))
        with pytest.raises(MailError, match="certificate"):
            await mailer.send(mail())
        assert (box.mails, box.logins) == ([], [])
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        await mailer.send(mail())
        assert box.logins == [("us@er", "pass/word")]
        assert [recipients for recipients, _ in box.mails] == [["team@example.org"]]


async def test_a_connection_that_begins_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, cert = await server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    async with serving_mail(tls=context) as box:
        await Mailer(config(f"smtps://{HOST}:{box.port}")).send(mail())
        assert len(box.mails) == 1


async def test_a_server_without_starttls_gets_nothing_unless_plain_text_is_allowed() -> None:
    async with serving_mail(needs_login=True) as box:
        url = f"smtp://user:secret@{HOST}:{box.port}"
        with pytest.raises(MailError, match="STARTTLS"):
            await Mailer(config(url)).send(mail())
        assert (box.mails, box.logins) == ([], [])
        await Mailer(config(url, plain_text=True)).send(mail())
        assert (len(box.mails), box.logins) == (1, [("user", "secret")])


async def test_a_server_that_does_not_answer_is_left_after_the_time_out() -> None:
    async with serving_mail() as box:
        box.answering.clear()
        with pytest.raises(MailError):
            await Mailer(config(f"smtp://127.0.0.1:{box.port}", timeout_s=0.3)).send(mail())
        box.answering.set()


async def test_one_recipient_that_is_refused_is_no_reason_to_send_again(caplog: pytest.LogCaptureFixture) -> None:
    async with serving_mail() as box:
        box.unknown_recipients = {"gone@example.org"}
        message = mail()
        del message["To"]
        message["To"] = "team@example.org, gone@example.org"
        await Mailer(config(f"smtp://127.0.0.1:{box.port}")).send(message)
        assert [recipients for recipients, _ in box.mails] == [["team@example.org"]]
        assert "refused 1 recipients (550)" in caplog.text
        message.replace_header("To", "gone@example.org")
        with pytest.raises(MailError):
            await Mailer(config(f"smtp://127.0.0.1:{box.port}")).send(message)


@pytest.mark.parametrize(
    "url",
    [
        *("http://secret@host", "smtp://", "smtp:///secret", "smtp://host/secret", "smtp://host:secret"),
        *("smtp://host:99999", "smtp://host?secret", "smtp://secret@host", "smtp://[secret"),
    ],
)
def test_a_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        StoredProjectsConfig.model_validate({"email": {"url": url, "sender": SENDER}})
    assert "secret" not in str(refusal.value)
    assert "url must" in str(refusal.value)


def test_the_connection_is_encrypted_by_what_the_url_and_the_host_are() -> None:
    assert config("smtp://mail.example.org").find_server().needs_starttls
    assert config("smtp://mail.example.org").find_server().port == 587
    assert not config("smtp://mail.example.org", plain_text=True).find_server().needs_starttls
    assert not config("smtp://localhost:25").find_server().needs_starttls
    assert not config("smtp://[::1]:25").find_server().needs_starttls
    assert config("smtp://localhost.example.org").find_server().needs_starttls
    server = config("smtps://user:secret@mail.example.org").find_server()
    assert (server.port, server.is_tls, server.needs_starttls) == (465, True, False)
    assert "secret" not in f"{server!r} {config('smtps://user:secret@host')!r}"
    with pytest.raises(ValidationError, match="plain_text"):
        config("smtps://mail.example.org", plain_text=True)
    with pytest.raises(ValidationError, match="e-mail address"):
        config("smtp://mail.example.org", sender="stack")
