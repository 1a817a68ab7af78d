"""Sending of one event to a webhook: one signed POST, and its outcome."""

import time

from apis.documents.fetcher import Fetcher, FetchRequest
from apis.errors import FetchFailed
from apis.telemetry import SpanType, open_span
from providers.webhooks.delivery_log import AttemptRecord
from providers.webhooks.receivers import Webhook, build_signed_headers


async def post_event(
    fetcher: Fetcher, hook: Webhook, delivery_id: str, body: bytes, *, resend_count: int = 0
) -> AttemptRecord:
    """Send the event once. Each attempt has a new signature, because receivers refuse old ones."""
    began_at, began_s = time.time(), time.monotonic()
    outgoing = FetchRequest(
        hook.url,
        "POST",
        build_signed_headers(hook.signing_secrets, delivery_id, int(began_at), body),
        body,
        follow_redirects=False,
        timeout_s=hook.timeout_s,
        allow_private=hook.private,
    )
    code = error = None
    try:
        # the host alone: other parts of the URL may be secret
        with open_span(SpanType.WEBHOOK, "POST", {"http.request.method": "POST", "server.address": str(hook)}) as span:
            span.set({"http.request.resend_count": resend_count} if resend_count else {})
            async with fetcher.open(outgoing) as incoming:
                code = incoming.status
            span.set({"http.response.status_code": code})
            if code >= 400:
                span.fail(str(code))
    except FetchFailed as exc:
        error = exc.message
    return AttemptRecord(began_at, round((time.monotonic() - began_s) * 1000), code, error)
