"""Organization: what a stack keeps of its projects, as far as other APIs use it."""

from dataclasses import dataclass

from apis.accounts.charges import Meter


@dataclass(eq=False)
class Organization:
    """The projects and keys of a stack, apart from who may send a request. A stack has one, or none where its keys are
    those of the run config.

    `currency` is that of the prices: three lower-case letters of ISO 4217. `cache_salt_secret` is shared by all workers
    and known to no client; it is there once the accounts have started.
    """

    meter: Meter
    currency: str
    cache_salt_secret: bytes | None = None
