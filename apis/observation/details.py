"""Details of one stored response: the tree of its chain, and the deliveries of its end to webhooks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from apis.wire.base import Wire


class ResponseTreeParams(Wire):
    """How many responses of a chain's tree are listed at most."""

    limit: int = Field(200, ge=1, le=1000)


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One POST of an event: when it began in Unix time, how long it took, and its result: the status code of the
    answer, or the reason why there was none."""

    created_at: float
    duration_ms: int
    status_code: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class DeliverySummary:
    """The delivery of an event to one webhook, whose URL is shown by its host alone, because the rest may be secret.
    `attempts` are the latest of `attempt_count`; a `pending` one is tried again at `next_attempt_at`."""

    id: str
    object: Literal["webhook_delivery"]
    event: str
    host: str
    status: Literal["pending", "delivered", "failed"]
    created_at: float
    next_attempt_at: float | None
    attempt_count: int
    attempts: Sequence[DeliveryAttempt]
