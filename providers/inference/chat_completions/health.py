"""Checks of the servers of a provider, which let requests through to one that is back, and log each change."""

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


async def watch_health(upstreams: Sequence[Upstream], interval_s: float) -> None:
    """Watch over several servers until cancelled. The state of each is logged once at the start and at each change. A
    single server that is well gets no requests from here until a request to it fails."""
    await asyncio.gather(*(_watch(upstream, interval_s, is_single=len(upstreams) == 1) for upstream in upstreams))


async def _watch(upstream: Upstream, interval_s: float, *, is_single: bool) -> None:
    was_healthy: bool | None = None
    pause_s = min(RECOVERY_INTERVAL_S, interval_s)
    while True:
        upstream.wakeup.clear()
        is_healthy = await _check(upstream, interval_s, was_healthy=was_healthy)
        if is_healthy and was_healthy is False:
            upstream.breaker.record_success()
        was_healthy = is_healthy
        await asyncio.sleep(pause_s)
        if is_healthy:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_single else interval_s):
                    await upstream.wakeup.wait()


async def _check(upstream: Upstream, limit_s: float, *, was_healthy: bool | None) -> bool:
    """Request the list of models, record the result, and log a change. A server that answers with another error is
    there: it may not list its models."""
    url = upstream.endpoint.base_url
    try:
        async with asyncio.timeout(limit_s):
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
