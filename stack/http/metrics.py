"""Figures of what this process serves, in Prometheus' text format.

With several workers each answers for itself: a scrape reaches one of them, and its series name it (`worker`). No label
holds what came from outside: routes are templates, methods and statuses few, and a model has a name here where the
inference lists it; all other models are one.
"""

import asyncio
import dataclasses
import math
import multiprocessing
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from apis.errors import StackError
from apis.inference import Inference
from apis.provider import Provider
from stack import __version__
from stack.http.request_record import OTHER, WEBSOCKET, RequestRecord, TokenCounts

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKET_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_MAX_MODELS: Final = 256
_LIST_MODELS_TIMEOUT_S: Final = 2.0

Labels = tuple[tuple[str, str], ...]


class _Sample(NamedTuple):
    labels: Labels
    value: float
    suffix: str = ""


class _Histogram:
    """How many took how long."""

    def __init__(self) -> None:
        self._bucket_counts = [0] * (len(_BUCKET_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._bucket_counts[bisect_left(_BUCKET_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def samples(self, labels: Labels) -> Iterator[_Sample]:
        count = 0
        for bound, more in zip((*_BUCKET_BOUNDS_S, math.inf), self._bucket_counts, strict=True):
            count += more
            yield _Sample((*labels, ("le", _format_number(bound))), count, "_bucket")
        yield _Sample(labels, self._sum_s, "_sum")
        yield _Sample(labels, count, "_count")


class Metrics:
    """The figures of one app. All of it is of the event loop's thread."""

    def __init__(self) -> None:
        self.requests_in_flight = 0
        self.open_websockets = 0
        self._request_counts: dict[tuple[str, str, int], int] = {}
        self._duration_histograms: dict[str, _Histogram] = {}
        self._first_byte_histograms: dict[str, _Histogram] = {}
        self._first_output_histogram = _Histogram()
        self._outcome_counts: dict[str, int] = {}
        self._listed_models: set[str] = set()
        self._tokens_by_model: dict[str, TokenCounts] = {}
        self._unlisted_tokens: dict[str, TokenCounts] = {}
        child = multiprocessing.parent_process() is not None
        self._worker_labels: Labels = (("worker", str(os.getpid())),) if child else ()

    def count_request(self, request_record: RequestRecord) -> None:
        """A visit that is over."""
        key = request_record.route, request_record.method, request_record.status
        self._request_counts[key] = self._request_counts.get(key, 0) + 1
        if request_record.method != WEBSOCKET:
            _get_histogram(self._duration_histograms, request_record.route).observe(request_record.elapsed_s())
            if request_record.is_stream:
                _get_histogram(self._first_byte_histograms, request_record.route).observe(request_record.first_byte_s)
            if not math.isnan(request_record.first_output_s):
                self._first_output_histogram.observe(request_record.first_output_s)
        if request_record.outcome:
            self._outcome_counts[request_record.outcome] = self._outcome_counts.get(request_record.outcome, 0) + 1
        if request_record.tokens is not None:
            self._add_tokens(request_record.model, request_record.tokens)

    def _add_tokens(self, model: str, tokens: TokenCounts) -> None:
        """What a model has used is kept under its name until it is known whether that may be told."""
        kept = self._tokens_by_model if model in self._listed_models else self._unlisted_tokens
        if kept is self._unlisted_tokens and model not in kept and len(kept) >= _MAX_MODELS:
            kept, model = self._tokens_by_model, OTHER
        kept[model] = _add_token_counts(kept.get(model), tokens)

    async def _resolve_unlisted(self, inference: Inference) -> None:
        """Ask which names are models, where there are any of which that is not known."""
        if not self._unlisted_tokens:
            return
        with suppress(StackError, TimeoutError):
            async with asyncio.timeout(_LIST_MODELS_TIMEOUT_S):
                listed = await inference.models()
            found = {each.id for each in listed if each.id in self._unlisted_tokens}
            self._listed_models |= set(sorted(found)[: _MAX_MODELS - len(self._listed_models)])
            unsettled, self._unlisted_tokens = self._unlisted_tokens, {}
            for model, tokens in unsettled.items():
                name = model if model in self._listed_models else OTHER
                self._tokens_by_model[name] = _add_token_counts(self._tokens_by_model.get(name), tokens)

    async def render_text(self, inference: Inference, providers: Mapping[str, Provider], open_streams: int) -> bytes:
        """All figures; `providers` by their place in the run config, whose first part is their API. What is used of
        models that are not known yet is told of when the inference has listed its models."""
        await self._resolve_unlisted(inference)
        process = await asyncio.to_thread(lambda: [*_process_families()])
        families = [*self._edge_families(open_streams), *_provider_families(providers), *process]
        lines: list[str] = []
        for name, kind, about, samples in families:
            lines += f"# HELP {name} {about}", f"# TYPE {name} {kind}"
            lines += [
                f"{name}{sample.suffix}{_render_labels((*self._worker_labels, *sample.labels))} "
                f"{_format_number(sample.value)}"
                for sample in samples
            ]
        return "\n".join([*lines, ""]).encode()

    def _edge_families(self, open_streams: int) -> Iterator["_MetricFamily"]:
        yield "stack_info", "gauge", "What serves here.", [_Sample((("version", __version__),), 1)]
        visits = [
            _Sample((("route", route), ("method", method), ("status", str(status))), count)
            for (route, method, status), count in self._request_counts.items()
        ]
        yield "stack_requests_total", "counter", "Requests that are over; 499 is a client that left first.", visits
        yield "stack_requests_in_flight", "gauge", "Requests that are not over.", [_Sample((), self.requests_in_flight)]
        yield "stack_websockets_open", "gauge", "WebSockets that are open.", [_Sample((), self.open_websockets)]
        yield "stack_streams_open", "gauge", "Event streams that are open.", [_Sample((), open_streams)]
        for name, about, of_routes in (
            ("stack_request_duration_seconds", "From a request's head to its answer's end.", self._duration_histograms),
            (
                "stack_time_to_first_byte_seconds",
                "The same to the head of the answer, where that is a stream.",
                self._first_byte_histograms,
            ),
        ):
            timed = [each for route, times in of_routes.items() for each in times.samples((("route", route),))]
            yield name, "histogram", about, timed
        name, about = "stack_time_to_first_output_seconds", "To the first output of a response that is streamed."
        yield name, "histogram", about, [*self._first_output_histogram.samples(())]
        ended = [_Sample((("status", outcome),), count) for outcome, count in self._outcome_counts.items()]
        yield "stack_responses_total", "counter", "Responses by how they ended; in the background, as queued.", ended
        used = [
            _Sample((("model", model), ("kind", kind)), count)
            for model, tokens in self._tokens_by_model.items()
            for kind, count in zip(tokens.__struct_fields__, _token_counts(tokens), strict=True)
        ]
        yield (
            "stack_tokens_total",
            "counter",
            "Tokens used; cached ones are of the input, reasoning of the output.",
            used,
        )


_MetricFamily = tuple[str, str, str, Iterable[_Sample]]


def _provider_families(providers: Mapping[str, Provider]) -> Iterator[_MetricFamily]:
    """What they tell of themselves: a number may go up only, or down as well, which its name has to say."""
    told: dict[str, list[_Sample]] = {}
    for path, provider in providers.items():
        figures = provider.metrics()
        for field in dataclasses.fields(figures) if figures is not None else ():
            unit = f"{field.name.removesuffix('_s')}_seconds" if field.name.endswith("_s") else field.name
            sample = _Sample((("provider", path),), float(getattr(figures, field.name)))
            told.setdefault(f"stack_{path.partition('.')[0]}_{unit}", []).append(sample)
    for name, samples in told.items():
        yield name, "untyped", "As the provider tells it.", samples


def _process_families() -> Iterator[_MetricFamily]:
    process = psutil.Process()
    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
        told = (
            ("cpu_seconds_total", "counter", cpu.user + cpu.system),
            ("resident_memory_bytes", "gauge", memory.rss),
            ("virtual_memory_bytes", "gauge", memory.vms),
            ("open_fds", "gauge", process.num_fds()),
            ("threads", "gauge", process.num_threads()),
            ("start_time_seconds", "gauge", process.create_time()),
        )
    for name, kind, value in told:
        yield f"process_{name}", kind, "Of this process, without its children.", [_Sample((), value)]


def _get_histogram(histograms: dict[str, _Histogram], route: str) -> _Histogram:
    found = histograms.get(route)
    if found is None:
        found = histograms[route] = _Histogram()
    return found


def _token_counts(tokens: TokenCounts) -> tuple[int, int, int, int]:
    return tokens.input, tokens.cached, tokens.output, tokens.reasoning


def _add_token_counts(total: TokenCounts | None, added: TokenCounts) -> TokenCounts:
    if total is None:
        return added
    return TokenCounts(*(one + other for one, other in zip(_token_counts(total), _token_counts(added), strict=True)))


def _format_number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.0f}" if float(value).is_integer() else repr(float(value))


def _render_labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escape_label_value(value)}"' for name, value in labels]) + "}"


def _escape_label_value(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
