"""ObjectStoreConfig: where an object store is, and how it is used."""

import ipaddress
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from providers.files.recorded import RecordedFiles

_SCHEMES = ("s3", "gs", "az", "file")


class ObjectStoreConfig(RecordedFiles.Config):
    """`url` is the folder of the files: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or
    `file:///FOLDER`. Credentials come from the environment, as the store's own tools read them. `endpoint` is for
    servers that speak the protocol of S3, Azure or Google; `path_style: false` puts the bucket into the host's name.
    `encryption` and `kms_key_id` are those of S3; elsewhere the bucket says how it is encrypted. `put_if_absent: false`
    and `checksums: false` are for servers that do not know conditional writes (`If-None-Match`) or SHA-256 checksums.
    `timeout_s` bounds one request, `retry_timeout_s` all attempts. Objects without a file are deleted every
    `sweep_interval_s`, once they are `orphan_grace_s` old. `parallel_writes` is the number of pieces of 8 MiB that a
    process holds while they are written."""

    url: str = Field(min_length=1, max_length=1024)
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/?#]+/?$")
    region: str | None = None
    path_style: bool = True
    encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    kms_key_id: str | None = None
    put_if_absent: bool = True
    checksums: bool = True
    timeout_s: float = Field(default=60.0, gt=0, le=600)
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    max_retries: int = Field(default=4, ge=0, le=20)
    retry_timeout_s: float = Field(default=60.0, gt=0, le=300)
    sweep_interval_s: float = Field(default=3600.0, gt=0, le=604_800)
    orphan_grace_s: float = Field(default=86_400.0, ge=0, le=2_592_000)
    parallel_writes: int = Field(default=16, ge=1, le=256)

    @field_validator("url")
    @classmethod
    def _require_store(cls, value: str) -> str:
        url = urlsplit(value)
        if url.scheme not in _SCHEMES:
            raise ValueError("must begin with s3://, gs://, az:// or file:///.")
        if url.scheme == "file" and (url.netloc or url.path in ("", "/")):
            raise ValueError("must be file:/// and the absolute path of a folder.")
        if url.scheme != "file" and not url.netloc:
            raise ValueError(f"must name a bucket: {url.scheme}://BUCKET/PREFIX.")
        if "@" in url.netloc or url.query or url.fragment:
            raise ValueError("must be a bucket and a prefix alone. Credentials come from the environment.")
        return value

    @field_validator("endpoint")
    @classmethod
    def _strip_slash(cls, value: str | None) -> str | None:
        return None if value is None else value.removesuffix("/")

    @model_validator(mode="after")
    def _require_s3(self) -> Self:
        if not self.url.startswith("s3://"):
            for name in ("region", "encryption", "kms_key_id"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for s3:// alone.")
        if not self.path_style and self.endpoint is not None and _is_address(self.endpoint):
            raise ValueError("path_style: false needs an endpoint with a name: the bucket becomes a part of it.")
        if self.kms_key_id is not None and self.encryption not in ("aws:kms", "aws:kms:dsse"):
            raise ValueError("kms_key_id needs encryption: aws:kms or aws:kms:dsse.")
        return self


def _is_address(endpoint: str) -> bool:
    try:
        ipaddress.ip_address(urlsplit(endpoint).hostname or "")
    except ValueError:
        return False
    return True
