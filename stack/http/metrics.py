"""Metrics for Prometheus, counted and rendered by prometheus-client.

With several workers each counts into its own files of one directory, and a scrape of any worker returns the sums of
all. A worker that replaces another goes on counting in the same files, so that no count is lost with a process. Gauges
of the other workers, and the tokens of a model that was not used before, are at most a second old. No label holds text
of a client: routes are templates, methods and statuses are few, and a model has its name only if the inference lists
it; all other models are `other`.
"""

import asyncio
import dataclasses
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import psutil
from prometheus_client import multiprocess, values
from prometheus_client.metrics import Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from apis.deltas import Usage
from apis.errors import StackError
from apis.inference import Inference
from apis.provider import Provider
from providers.common.counters import PROCESS_COUNTERS
from stack import __version__
from stack.http.request_record import OTHER, WEBSOCKET, RequestRecord

METRICS_PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKET_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_SHARE_BOUNDS: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_MAX_MODELS: Final = 256
_LIST_MODELS_TIMEOUT_S: Final = 2.0
_DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that says to prometheus-client where the files of a process are."""
_SUMMED_GAUGES: Final = frozenset({"stack_requests_in_flight", "stack_websockets_open", "stack_streams_open"})


def share_metrics(directory: Path, worker: int) -> None:
    """Count from now on into the files of worker number `worker`; called in the worker, before its app is created."""
    os.environ[_DIRECTORY_VARIABLE] = str(directory)
    library: Any = values  # which has no types here
    library.ValueClass = library.MultiProcessValue(process_identifier=lambda: worker)
    _pid_file(directory, worker).write_text(str(os.getpid()))


def forget_worker(directory: Path, worker: int) -> None:
    """Remove the gauges of a worker that has ended; its counts stay."""
    library: Any = multiprocess  # which has no types here
    library.mark_process_dead(worker, str(directory))
    _pid_file(directory, worker).unlink(missing_ok=True)


def _pid_file(directory: Path, worker: int) -> Path:
    return directory / f"{worker}.pid"


class Metrics:
    """The metrics of one app. All methods but `count_dropped_telemetry` run on the event loop's thread."""

    def __init__(self) -> None:
        self.requests_in_flight = 0
        self.open_websockets = 0
        directory = os.environ.get(_DIRECTORY_VARIABLE)
        self._directory = Path(directory) if directory else None
        """The directory that workers share; None in a process that serves alone."""
        self._registry = CollectorRegistry()
        add_to = None if self._directory else self._registry
        counter = partial(Counter, registry=add_to)
        histogram = partial(Histogram, buckets=_BUCKET_BOUNDS_S, registry=add_to)
        summed_gauge = partial(Gauge, registry=add_to, multiprocess_mode="livesum")
        # the library's own lookup of the child of some labels costs several times that of a cache
        about = "Requests that are over; 499 is a client that left first."
        self._requests = cache(counter("stack_requests_total", about, ("route", "method", "status")).labels)
        about = "Responses by how they ended; in the background, as queued."
        self._responses = cache(counter("stack_responses_total", about, ("status",)).labels)
        about = "Tokens used; cached ones are of the input, reasoning of the output."
        self._tokens = cache(counter("stack_tokens_total", about, ("model", "kind")).labels)
        about = "From a request's head to its answer's end."
        self._durations = cache(histogram("stack_request_duration_seconds", about, ("route",)).labels)
        about = "The same to the head of the answer, where that is a stream."
        self._first_bytes = cache(histogram("stack_time_to_first_byte_seconds", about, ("route",)).labels)
        about = "To the first output of a response that is streamed."
        self._first_output = histogram("stack_time_to_first_output_seconds", about)
        about = "Telemetry that was dropped because its queue was full or its receiver did not take it."
        self._dropped_telemetry = cache(counter("stack_telemetry_dropped_total", about, ("signal",)).labels)
        for signal in ("traces", "metrics", "logs"):
            self._dropped_telemetry(signal)  # shown from the start, as zero
        about = "Share of a response's input that the engine had in its prefix cache, over all its turns."
        self._cached_share = Histogram("stack_cached_input_share", about, buckets=_SHARE_BOUNDS, registry=add_to)
        self._in_flight_gauge = summed_gauge("stack_requests_in_flight", "Requests that are not over.")
        self._websockets_gauge = summed_gauge("stack_websockets_open", "WebSockets that are open.")
        self._streams_gauge = summed_gauge("stack_streams_open", "Event streams that are open.")
        worker_gauge = partial(Gauge, labelnames=("provider",), registry=add_to, multiprocess_mode="liveall")
        self._provider_gauge = cache(partial(worker_gauge, documentation="Reported by the provider."))
        self._process_counters = [(source, counter(source.name, source.about)) for source in PROCESS_COUNTERS]
        self._process_counts = dict.fromkeys(PROCESS_COUNTERS, 0)
        self._listed_models: set[str] = {OTHER}
        self._unlisted_tokens: dict[str, Usage] = {}

    @property
    def is_shared(self) -> bool:
        """True in a worker whose counts other workers render: then `refresh` has to run every second."""
        return self._directory is not None

    def count_request(self, request_record: RequestRecord) -> None:
        """Count a request, or a response on a WebSocket, that is over."""
        self._requests(request_record.route, request_record.method, request_record.status).inc()
        if request_record.method != WEBSOCKET:
            self._durations(request_record.route).observe(request_record.elapsed_s())
            if request_record.is_stream:
                self._first_bytes(request_record.route).observe(request_record.first_byte_s)
            if not math.isnan(request_record.first_output_s):
                self._first_output.observe(request_record.first_output_s)
        if request_record.outcome:
            self._responses(request_record.outcome).inc()
        if (tokens := request_record.tokens) is not None:
            self._count_tokens(request_record.model, tokens)
            if tokens.input_tokens:
                self._cached_share.observe(tokens.cached_tokens / tokens.input_tokens)

    def count_dropped_telemetry(self, signal: str, count: int) -> None:
        """Count telemetry that was dropped; the only method that may be called from any thread."""
        self._dropped_telemetry(signal).inc(count)

    def _count_tokens(self, model: str, tokens: Usage) -> None:
        """Count the tokens of a model, or hold them back until the inference has listed it."""
        unlisted = self._unlisted_tokens
        if model in self._listed_models:
            self._add_tokens(model, tokens)
        elif model in unlisted or len(unlisted) < _MAX_MODELS:
            unlisted[model] = unlisted[model].plus(tokens) if model in unlisted else tokens
        else:
            self._add_tokens(OTHER, tokens)

    def _add_tokens(self, model: str, tokens: Usage) -> None:
        for name in Usage.__struct_fields__:
            counter, count = self._tokens(model, name.removesuffix("_tokens")), getattr(tokens, name)
            if count:  # the counter is shown from now on, as zero otherwise
                counter.inc(count)

    async def _resolve_unlisted(self, inference: Inference) -> None:
        """List the models if tokens of unlisted ones are held back, and count those under the name or as `other`."""
        if not self._unlisted_tokens:
            return
        with suppress(StackError, TimeoutError):
            async with asyncio.timeout(_LIST_MODELS_TIMEOUT_S):
                models = await inference.models()
            names = {model.id for model in models if model.id in self._unlisted_tokens}
            self._listed_models |= set(sorted(names)[: _MAX_MODELS + 1 - len(self._listed_models)])
            resolved, self._unlisted_tokens = self._unlisted_tokens, {}
            for model, tokens in resolved.items():
                self._add_tokens(model if model in self._listed_models else OTHER, tokens)

    async def refresh(self, inference: Inference, providers: Mapping[str, Provider], open_streams: int) -> None:
        """Set the gauges, and count the held-back tokens; `providers` by their path in the run config, which starts
        with their API."""
        await self._resolve_unlisted(inference)
        self._in_flight_gauge.set(self.requests_in_flight)
        self._websockets_gauge.set(self.open_websockets)
        self._streams_gauge.set(open_streams)
        for source, shown_counter in self._process_counters:
            shown_counter.inc(source.count - self._process_counts[source])
            self._process_counts[source] = source.count
        for path, provider in providers.items():
            figures = provider.metrics()
            for field in dataclasses.fields(figures) if figures is not None else ():
                unit = f"{field.name.removesuffix('_s')}_seconds" if field.name.endswith("_s") else field.name
                gauge = self._provider_gauge(f"stack_{path.partition('.')[0]}_{unit}")
                gauge.labels(path).set(float(getattr(figures, field.name)))

    async def collect(self) -> Sequence[Metric]:
        """Return all metrics, as `render_text` renders them; `refresh` sets the gauges of this process first."""
        return await asyncio.to_thread(list, _Scrape(self._registry, self._directory).collect())

    async def render_text(self) -> bytes:
        """Return all metrics in Prometheus' text format; of this process, `refresh` sets the gauges first."""
        return await asyncio.to_thread(_render, _Scrape(self._registry, self._directory))


def _render(scrape: "_Scrape") -> bytes:
    from prometheus_client.exposition import generate_latest  # noqa: PLC0415 - with servers of its own, only to render

    return generate_latest(scrape)


class _Scrape(Collector):
    """The metrics of one scrape: the library's own, those of the operating system's processes, and the version."""

    def __init__(self, registry: CollectorRegistry, directory: Path | None) -> None:
        self._registry = registry
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("stack_info", "What serves here.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        metrics = self._registry.collect() if self._directory is None else read_shared_metrics(self._directory)
        for metric in metrics:
            if metric.type == "gauge" and metric.name not in _SUMMED_GAUGES:
                # a provider's number may go up only or down as well, which its name has to say
                metric.type = "unknown"
            metric.samples = [
                sample._replace(labels={_LABEL_NAMES.get(name, name): text for name, text in sample.labels.items()})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric
        yield from _process_metrics({"": os.getpid()} if self._directory is None else _read_pids(self._directory))


def read_shared_metrics(directory: Path) -> Iterable[Metric]:
    """Return the counts of all workers. A file that a worker is just beginning cannot be read, and is read again."""
    library: Any = multiprocess
    collector = library.MultiProcessCollector(None, str(directory))
    for pause_s in _READ_PAUSES_S:
        with suppress(struct.error, FileNotFoundError):
            return collector.collect()
        time.sleep(pause_s)
    return collector.collect()


_READ_PAUSES_S: Final = (0.01, 0.05, 0.25)


_LABEL_NAMES: Final = {"pid": "worker"}
"""Labels of prometheus-client that mean the number of a worker here."""


def _read_pids(directory: Path) -> dict[str, int]:
    """Return the process ids of the live workers by their number."""
    pids: dict[str, int] = {}
    for file in sorted(directory.glob("*.pid")):
        with suppress(FileNotFoundError, ValueError):
            pids[file.stem] = int(file.read_text())
    return pids


def _process_metrics(pids: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the figures of processes, by worker number; a process that serves alone has none, ''."""
    labels = [] if "" in pids else ["worker"]
    about = "Of this process, without its children."
    cpu_seconds = CounterMetricFamily("process_cpu_seconds", about, labels=labels)
    names = ("resident_memory_bytes", "virtual_memory_bytes", "open_fds", "threads", "start_time_seconds")
    gauges = {name: GaugeMetricFamily(f"process_{name}", about, labels=labels) for name in names}
    for worker, pid in pids.items():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                cpu, memory = process.cpu_times(), process.memory_info()
                numbers = (memory.rss, memory.vms, process.num_fds(), process.num_threads(), process.create_time())
            cpu_seconds.add_metric([worker] if labels else [], cpu.user + cpu.system)
            for gauge, number in zip(gauges.values(), numbers, strict=True):
                gauge.add_metric([worker] if labels else [], number)
    yield cpu_seconds
    yield from gauges.values()
