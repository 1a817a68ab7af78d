"""HealthWatch: checks the servers of a provider, lets requests through to one that is back, and logs each change."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from apis.errors import StackError, UpstreamTimeout
from apis.inference import Model
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.chat_completions.replicas import Upstream

RECOVERY_INTERVAL_S: Final = 1.0
"""Seconds between two checks of a server that does not answer, and at least between any two checks."""
_MAX_LOGGED_MODELS: Final = 8

_log = logging.getLogger(__name__)


class HealthWatch:
    """Watch over several servers. The state of each is logged once at the start and at each change. A single server
    that is well gets no requests from here until a request to it fails."""

    def __init__(self, upstreams: Sequence[Upstream], interval_s: float) -> None:
        self._upstreams = upstreams
        self._interval_s = interval_s
        self._pause_s = min(RECOVERY_INTERVAL_S, interval_s)

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.gather(*(self._watch(upstream) for upstream in self._upstreams))

    async def _watch(self, upstream: Upstream) -> None:
        was_healthy: bool | None = None
        while True:
            upstream.wakeup.clear()
            is_healthy = await self._check(upstream, was_healthy=was_healthy)
            if is_healthy and was_healthy is False:
                upstream.breaker.record_success()
            was_healthy = is_healthy
            await asyncio.sleep(self._pause_s)
            if is_healthy:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if len(self._upstreams) == 1 else self._interval_s):
                        await upstream.wakeup.wait()

    async def _check(self, upstream: Upstream, *, was_healthy: bool | None) -> bool:
        """Request the list of models, record the result, and log a change. A server that answers with another error is
        there: it may not list its models."""
        url = upstream.endpoint.base_url
        try:
            async with asyncio.timeout(max(self._interval_s, self._pause_s)):
                models = await upstream.endpoint.models()
        except (UpstreamUnavailable, UpstreamTimeout, TimeoutError) as exc:
            upstream.record_health(is_healthy=False)
            if was_healthy is not False:
                reason = exc.message if isinstance(exc, StackError) else "It is too slow."
                _log.warning("the inference server %s does not answer yet: %s", url, reason)
            return False
        except StackError as exc:
            upstream.record_health(is_healthy=True)
            if was_healthy is not True:
                _log.warning("the inference server %s answers, but does not list its models: %s", url, exc.message)
            return True
        upstream.record_health(is_healthy=True)
        if was_healthy is not True:
            _log.info("the inference server %s serves %s", url, _render_models(models))
        return True


def _render_models(models: Sequence[Model]) -> str:
    names = [
        model.id if model.context_tokens is None else f"{model.id} ({model.context_tokens} tokens of context)"
        for model in models[:_MAX_LOGGED_MODELS]
    ]
    more = f" and {len(models) - len(names)} more" if len(models) > len(names) else ""
    return f"{', '.join(names) or 'no models yet'}{more}"
