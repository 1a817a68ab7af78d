"""The settings of an object store: what is wrong is named by its field, and each kind of store can be opened."""

from typing import Any

import pytest
from pydantic import ValidationError

from apis.errors import ConfigError, StoreUnavailable
from providers.files.blob_objects import parse_folder, tenant_folder
from providers.files.object_config import ObjectStoreConfig
from providers.files.object_store import ObjectStoreFiles
from providers.files.objects import Objects
from providers.kv_store.memory import Memory
from tests.support.servers.s3_server import CREDENTIALS

S3: dict[str, Any] = {"url": "s3://bucket/prefix"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "ftp://bucket"}, "must begin with s3://"),
        ({"url": "file://folder/x"}, "the absolute path of a folder"),
        ({"url": "file:///"}, "the absolute path of a folder"),
        ({"url": "s3:///prefix"}, "must name a bucket"),
        ({"url": "s3://key:secret@bucket"}, "Credentials come from the environment"),
        ({"url": "s3://bucket?region=x"}, "a bucket and a prefix alone"),
        ({"url": "gs://bucket", "region": "x"}, "region is for s3:// alone"),
        ({"url": "az://box", "encryption": "AES256"}, "encryption is for s3:// alone"),
        ({**S3, "kms_key_id": "x"}, "kms_key_id needs encryption"),
        ({**S3, "endpoint": "minio:9000"}, "endpoint"),
        ({**S3, "endpoint": "http://127.0.0.1:1", "path_style": False}, "path_style: false needs"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectStoreConfig(**fields)


async def test_each_kind_of_store_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers, so each store is away; one whose environment is wrong is a wrong config."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="url: az://box/x cannot be used"):
        await Objects(ObjectStoreConfig(url="az://box/x")).get("a")
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
    for name, value in {**CREDENTIALS, **account, "GOOGLE_SKIP_SIGNATURE": "true"}.items():
        monkeypatch.setenv(name, value)
    away: dict[str, Any] = {"endpoint": "http://127.0.0.1:1", "max_retries": 0, "retry_timeout_s": 0.001}
    encrypted: dict[str, Any] = {**S3, "region": "eu-west-1", "encryption": "aws:kms", "kms_key_id": "k"}
    named: dict[str, Any] = {**S3, "path_style": False, "endpoint": "http://localhost:1"}
    for fields in ({"url": "az://box/x"}, {"url": "gs://bucket/x"}, S3, encrypted, named):
        with pytest.raises(StoreUnavailable):
            await Objects(ObjectStoreConfig.model_validate({**away, **fields})).get("a")


def test_only_a_folder_is_bound_to_its_machine() -> None:
    kv = Memory(Memory.Config())
    folder = ObjectStoreFiles(ObjectStoreFiles.Config(url="file:///tmp/x-files"), kv).machine_bound_state()
    assert folder is not None
    assert "mount that folder" in folder
    assert ObjectStoreFiles(ObjectStoreFiles.Config(**S3), kv).machine_bound_state() is None


@pytest.mark.parametrize("tenant", ["", "t", "T", "proj_12", "a/b", "x-1", ".", "..", "ünï", "a" * 300])
def test_a_tenant_is_found_again_by_its_folder(tenant: str) -> None:
    blob_id = f"file-{5:044x}"
    assert parse_folder(f"{tenant_folder(tenant)}/{blob_id}/000001") == (tenant, blob_id)
    assert all(len(name) < 256 for name in tenant_folder(tenant).split("/"))  # as file systems have them


@pytest.mark.parametrize("name", ["x", "t-a/b/000000", f"t-A/file-{5:044x}/000000", f"x-zz/file-{5:044x}/000000"])
def test_a_foreign_object_is_of_no_tenant(name: str) -> None:
    assert parse_folder(name) is None
