"""AccessTokens: the tokens of credentials, and new access tokens of OAuth (RFC 6749, section 6) for those that expire.

A refresh token may be good for one use. So one process at a time requests a new access token of a credential, and
stores its answer before any process uses it.
"""

import asyncio
import base64
import random
import re
import time
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote_plus, urlencode

import msgspec

from apis.documents.fetcher import Fetcher, FetchRequest, FetchResponse
from apis.errors import FetchFailed, ToolFailed
from apis.storage.lease import Lease, LeaseLost
from providers.vaults.auth import format_time, is_expired
from providers.vaults.credentials import StoredCredentials
from providers.vaults.records import CredentialRecord, CredentialRef, Json
from providers.vaults.sealing import Secrets

_MARGIN_S: Final = 30.0
"""Seconds before its expiry from which an access token is not used any more."""
_TIMEOUT_S: Final = 15.0
_MAX_ANSWER_BYTES: Final = 256 * 1024
_LEASE_S: Final = 30.0
_PAUSE_S: Final = 0.2
_ERROR_CODES: Final = frozenset(
    {"invalid_request", "invalid_client", "invalid_grant", "unauthorized_client", "unsupported_grant_type"}
    | {"invalid_scope", "invalid_target", "server_error", "temporarily_unavailable"}
)
"""Codes of an endpoint's errors that are passed on; a text of its own could have the secrets that it was sent."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,16384}")


class AccessTokens:
    """The tokens of the credentials of one store."""

    def __init__(self, credentials: StoredCredentials, fetcher: Fetcher) -> None:
        self._credentials = credentials
        self._fetcher = fetcher

    async def find(self, ref: CredentialRef, record: CredentialRecord, refused: str | None) -> str | None:
        """Return the token of a credential, another one than `refused`, None where there is none. Raises ToolFailed."""
        token = self._credentials.unseal(ref, record)["token"]
        can_renew = bool(record.auth.get("refresh"))
        if token != refused and not (can_renew and is_expired(record.auth, time.time() + _MARGIN_S)):
            return token
        return await self._renew(ref, token) if can_renew else None

    async def _renew(self, ref: CredentialRef, old_token: str) -> str:
        """Return an access token that is not `old_token`, requested by this process or another one."""
        lease = Lease(self._credentials.kv, ref.renewal_key, _LEASE_S)
        deadline = time.monotonic() + _LEASE_S
        while await lease.acquire() is None:
            if time.monotonic() > deadline:
                raise ToolFailed(f"The access token of the credential {ref.id} is being renewed: try again.")
            await asyncio.sleep(random.uniform(_PAUSE_S / 2, _PAUSE_S))  # noqa: S311 - not a secret
        try:
            record = await self._credentials.load(ref)
            if record is None:
                raise ToolFailed(f"The credential {ref.id} was deleted.")
            secrets = self._credentials.unseal(ref, record)
            if secrets["token"] != old_token:  # another process was first
                return secrets["token"]
            return await self._request_and_store(ref, record, secrets)
        finally:
            with suppress(LeaseLost):
                await lease.release()

    async def _request_and_store(self, ref: CredentialRef, record: CredentialRecord, secrets: Secrets) -> str:
        answer = await self._request(ref, record.auth["refresh"], secrets)
        token, expires_in = answer.get("access_token"), answer.get("expires_in")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise ToolFailed(f"The token endpoint of the credential {ref.id} answered without an access token.")
        secrets, refresh_token = {**secrets, "token": token}, answer.get("refresh_token")
        if isinstance(refresh_token, str) and _TOKEN.fullmatch(refresh_token):
            secrets["refresh_token"] = refresh_token
        expires_at = None
        if isinstance(expires_in, int | float) and 0 < expires_in < 2**31:
            expires_at = format_time(time.time() + expires_in)
        auth = {**record.auth, "expires_at": expires_at}
        if await self._credentials.put_secrets(ref, record, auth, secrets):
            return token
        current = await self._credentials.load(ref)
        if current is None:
            raise ToolFailed(f"The credential {ref.id} was deleted.")
        return self._credentials.unseal(ref, current)["token"]

    async def _request(self, ref: CredentialRef, refresh: Json, secrets: Secrets) -> dict[str, Any]:
        form = {"grant_type": "refresh_token", "refresh_token": secrets["refresh_token"]}
        form |= {name: refresh[name] for name in ("scope", "resource") if refresh[name]}
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        if refresh["token_endpoint_auth"]["type"] == "client_secret_basic":
            pair = f"{quote_plus(refresh['client_id'])}:{quote_plus(secrets['client_secret'])}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = refresh["client_id"]
            form |= {"client_secret": secrets["client_secret"]} if "client_secret" in secrets else {}
        request = FetchRequest(
            refresh["token_endpoint"],
            "POST",
            headers,
            urlencode(form).encode(),
            follow_redirects=False,
            max_bytes=_MAX_ANSWER_BYTES,
            timeout_s=_TIMEOUT_S,
        )
        try:
            response = await self._fetcher.fetch(request)
        except FetchFailed as exc:
            raise ToolFailed(f"The token endpoint of the credential {ref.id} cannot be used. {exc.message}") from None
        return _read_answer(ref, response)


def _read_answer(ref: CredentialRef, response: FetchResponse) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = msgspec.json.decode(response.body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        answer = {}
    if response.status == 200:
        return answer
    code = answer.get("error")
    why = f", {code}" if isinstance(code, str) and code in _ERROR_CODES else ""
    raise ToolFailed(
        f"The token endpoint of the credential {ref.id} gave no new access token (HTTP {response.status}{why})."
    )
