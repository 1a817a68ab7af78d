"""Sums: counters of the process, which the SDK reads when it exports. To count costs a fraction of a microsecond."""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from apis.telemetry import Attributes, AttributeValue

_Key = tuple[tuple[str, AttributeValue], ...]


class Sums:
    """Running sums of metrics by their attributes, as observable instruments of a meter."""

    def __init__(self, meter: Meter, counters: Mapping[str, str], up_down_counters: Mapping[str, str]) -> None:
        """Both map names to units."""
        self._sums: dict[str, dict[_Key, float]] = {name: {} for name in (*counters, *up_down_counters)}
        for name, unit in counters.items():
            meter.create_observable_counter(name, [self._observer(name)], unit)
        for name, unit in up_down_counters.items():
            meter.create_observable_up_down_counter(name, [self._observer(name)], unit)

    def add(self, metric: str, value: float, attributes: Attributes) -> None:
        """Add to a sum, if the metric is one of these."""
        sums, key = self._sums.get(metric), tuple(attributes.items())
        if sums is not None:
            sums[key] = sums.get(key, 0) + value

    def _observer(self, metric: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        # called by the SDK's thread: the list is copied in one step, while the event loop goes on counting
        return lambda _: [Observation(value, dict(key)) for key, value in [*self._sums[metric].items()]]
