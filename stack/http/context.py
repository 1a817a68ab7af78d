"""HttpContext, the facts of one request and its end; Services, the open stack that handlers use."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from starlette.types import Scope

from apis.accounts.accounts import NO_CALLER, Caller
from apis.accounts.charges import Charge
from apis.errors import StackError, Unsupported, internal_error
from apis.fair_share import Place
from stack.build import Stack
from stack.http.cache_salts import CacheSalts
from stack.http.metering import end_charge
from stack.http.metrics import Metrics
from stack.http.readiness import StoreProbe
from stack.http.request_record import DISCONNECTED_STATUS, RequestRecord
from stack.http.shares import AdmissionQueue, RequestShares
from stack.http.streams import StreamMonitor

_log = logging.getLogger(__name__)
ProviderT = TypeVar("ProviderT")
_CONTEXT_KEY: Final = "stack.http_context"
_METRICS_REFRESH_S: Final = 1.0


class HttpContext(msgspec.Struct):
    """The facts of one request, shared by all layers within it: an HTTP request or a WebSocket, which the edge creates,
    one response on a WebSocket, or one line of a batch.

    `finish_request` counts and logs its record when it is over.
    """

    request_record: RequestRecord
    finish_request: Callable[[RequestRecord], None]
    trace: Mapping[str, str]
    """The W3C headers `traceparent` and `tracestate`, by name; empty without a valid parent."""
    tenant: str = ""
    """Empty until the edge has authenticated the request, and on paths that are open to all."""
    caller: Caller = NO_CALLER
    """The sender, its key and that key's rights; as `tenant`, unknown until the edge has authenticated the request."""
    authenticate_again: Callable[[], Awaitable[Caller]] | None = None
    """Returns the caller of a WebSocket's key as it is now, or raises Unauthorized; None where no key is needed."""
    charge: Charge | None = None
    """The charge of a request that reaches a model; the edge ends it when the request is over."""
    is_batch_line: bool = False
    """True for a request of a batch, which has no connection."""
    response_id: str | None = None
    """The id that a create of a response has to use; None lets the route choose one."""
    places: list[Place] = []
    """Places that the request, or its body, holds until the request is over."""
    created_id: str = ""
    """The id of the conversation, vector store or container that the request has created."""

    def fail(self, error: Exception) -> StackError:
        """Record the error with which the request ends, and return it as its client is to see it: a bug is logged, and
        shown as an internal error with the id of the request."""
        if not isinstance(error, StackError):
            _log.error("request %s failed on a bug", self.request_id, exc_info=error)
            error = internal_error(self.request_id)
        self.request_record.record_error(error)
        return error

    def end(self) -> None:
        """Release what the request holds, count and log it, and end its charge."""
        for place in self.places:
            place.release()
        self.request_record.status = self.request_record.status or DISCONNECTED_STATUS
        self.finish_request(self.request_record)
        end_charge(self.charge, self.request_record)

    @property
    def is_over_limit(self) -> bool:
        """True of a request that was refused under the limits of its key, before any work."""
        return bool(self.caller.limits) and self.charge is None

    @property
    def is_administrator(self) -> bool:
        """True if the sender may see and manage what belongs to no single tenant."""
        return self.caller.is_administrator

    @property
    def request_id(self) -> str:
        """The id in the `x-request-id` header of the response."""
        return self.request_record.id


def set_context(scope: Scope, context: HttpContext) -> None:
    """Store the context of the request whose scope it is; copies of the scope share it."""
    scope[_CONTEXT_KEY] = context


def get_context(scope: Scope) -> HttpContext:
    """Return the context that the edge stored."""
    return scope[_CONTEXT_KEY]


@dataclass(frozen=True, slots=True)
class Services:
    """The open stack of an app, and what its handlers share."""

    stack: Stack
    monitor: StreamMonitor
    metrics: Metrics
    cache_salts: CacheSalts
    shares: RequestShares
    admission: AdmissionQueue
    store_probe: StoreProbe

    def end_running(self) -> None:
        """Let the requests that still run end with an error when they are cancelled, because the process ends."""
        self.monitor.is_ending = True
        self.stack.responses.end_running()

    async def refresh_metrics(self) -> None:
        """Set the metrics that are not counted as they happen."""
        await self.metrics.refresh(self.stack.inference, self.stack.providers_by_path, self.monitor.open_streams)

    async def keep_metrics_fresh(self) -> None:
        """Refresh the metrics every second until cancelled, for the scrapes that other workers answer."""
        while True:
            await self.refresh_metrics()
            await asyncio.sleep(_METRICS_REFRESH_S)


def require_section(provider: ProviderT | None, lack: str, section: str) -> ProviderT:
    """Return the provider of a section of the run config. Raises Unsupported, which says what the server lacks, where
    there is none."""
    if provider is None:
        raise Unsupported(f"This server {lack}: its config has no section `{section}`.", code="not_configured")
    return provider


def get_services(scope: Scope) -> Services:
    """Return the services of the app that a request reached; they exist while its lifespan lasts."""
    return scope["app"].state.services
