"""The claim of a folder in an object store: which KVStore has the records of its objects."""

import hashlib
import secrets
from typing import Final

import msgspec

from apis.errors import ConfigError
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.common.state.scan import scan_records
from providers.files.objects import Objects

CLAIM_NAME: Final = "responses-stack-files.json"
_PREFIX: Final = "/file_store/"


class FolderClaim(msgspec.Struct):
    """The id of an object store, in its folder and in the KVStore that has its records."""

    id: str


async def claim_folder(objects: Objects, kv: KVStore, url: str) -> str:
    """Return the id of the object store, and claim its folder for this KVStore if it is new.

    Raises ConfigError if another KVStore has claimed it: each would delete the other's objects as orphans. A folder
    that was copied to another URL has its claim with it.
    """
    claim = await objects.get(CLAIM_NAME)
    if claim is None:
        await objects.put(CLAIM_NAME, encode_record(FolderClaim(await _find_id(kv, url))))
        claim = await objects.get(CLAIM_NAME)
    store_id = _read_claim(claim, url)
    if await find_claim_key(kv, store_id):
        return store_id
    raise ConfigError(
        f"url: {url} has the files of another kv_store. Choose another prefix; or, if that store is lost and its files "
        f"may be deleted, delete the object {CLAIM_NAME} there."
    )


async def find_claim_key(kv: KVStore, store_id: str) -> str:
    """Return the key under which the KVStore has the claim of this object store; empty where it has none."""
    async for key, record, _ in scan_records(kv, _PREFIX, FolderClaim):
        if record.id == store_id:
            return key
    return ""


async def _find_id(kv: KVStore, url: str) -> str:
    """Return the id of the object store at this URL, the same one for all processes."""
    key = _PREFIX + hashlib.sha256(url.encode()).hexdigest()
    await kv.write([Put(key, encode_record(FolderClaim(secrets.token_hex(16))), expect=ABSENT)])
    entry = await kv.get(key)
    assert entry is not None  # it is never deleted
    return decode_record(entry, FolderClaim).id


def _read_claim(claim: bytes | None, url: str) -> str:
    try:
        return msgspec.json.decode(claim or b"", type=FolderClaim).id
    except (msgspec.MsgspecError, ValueError) as exc:
        raise ConfigError(f"url: the object {CLAIM_NAME} of {url} is damaged. Restore it.") from exc
