"""The health monitor for Prometheus: a text file (node exporter's textfile collector) or an HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assc.errors import AsscError
from assc.monitor import STATES, HealthMonitor

PREFIX = "assc_"
Reports = Callable[[], Sequence[Mapping[str, Any]]]


def require_prometheus() -> None:
    """`AsscError` where the client library is not installed."""
    if find_spec("prometheus_client") is None:
        raise AsscError("metrics for Prometheus need the package prometheus-client: pip install 'assc[prometheus]'")


class HealthCollector:
    """A collector of `prometheus_client` over `HealthMonitor.report`s, asked anew at each scrape.

    Gauges of the window with the label `policy`: `assc_acceptance`, `assc_draft_share`, `assc_speed_up`,
    `assc_fallback_share`, `assc_state` (0 unknown, 1 healthy, 2 degraded, 3 failing), `assc_memory_peak_bytes`;
    counters:
    `assc_rounds_total`, `assc_fallback_rounds_total`, `assc_triggers_total` (label `figure`) and `assc_notes_total`
    (label `reason`). What is unknown is left out.
    """

    def __init__(self, reports: Reports) -> None:
        require_prometheus()
        self.reports = reports

    def describe(self) -> list[Any]:
        """Nothing is known before the first scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, doc: str) -> Any:
            return GaugeMetricFamily(PREFIX + name, doc, labels=["policy"])

        def counter(name: str, doc: str, *labels: str) -> Any:
            return CounterMetricFamily(PREFIX + name, doc, labels=["policy", *labels])

        gauges = {
            "acceptance": gauge("acceptance", "accepted / drafted tokens, last rounds"),
            "draft_share": gauge("draft_share", "seconds of drafting / seconds, last rounds"),
            "speed_up": gauge("speed_up", "speed over plain decoding, last rounds"),
            "fallback_share": gauge("fallback_share", "fallback rounds / rounds, last rounds"),
        }
        state = gauge("state", ", ".join(f"{i} {name}" for i, name in enumerate(STATES)))
        memory = gauge("memory_peak_bytes", "bytes of the device in use at once")
        rounds = counter("rounds", "rounds decoded")
        fallbacks = counter("fallback_rounds", "rollback rounds with a reason of the policy")
        triggers = counter("triggers", "times that a figure left its band", "figure")
        notes = counter("notes", "times that a reason of the policy began", "reason")
        for report in self.reports():
            label = [str(report.get("label", ""))]
            for name, value in report["window"]["figures"].items():
                if value is not None:
                    gauges[name].add_metric(label, value)
            state.add_metric(label, STATES.index(report["window"]["state"]))
            if report["memory_peak_bytes"] is not None:
                memory.add_metric(label, report["memory_peak_bytes"])
            rounds.add_metric(label, report["total"]["rounds"])
            fallbacks.add_metric(label, report["total"]["fallback_rounds"])
            for figure, count in report["triggers"].items():
                triggers.add_metric([*label, figure], count)
            for reason, note in report["notes"].items():
                notes.add_metric([*label, reason], note["times"])
        yield from (*gauges.values(), state, memory, rounds, fallbacks, triggers, notes)


def _registry(reports: Reports) -> Any:
    collector = HealthCollector(reports)
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def write_prometheus(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the reports, each with its `label`, to a text file, whole or not at all."""
    registry = _registry(lambda: reports)
    from prometheus_client import write_to_textfile

    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise AsscError(f"{path} cannot be written: {error.strerror or error}") from None


def serve_prometheus(monitors: Mapping[str, HealthMonitor], port: int = 9464, address: str = "127.0.0.1") -> Any:
    """Serve the monitors at http://address:port/metrics from a thread; returns the library's (server, thread)."""
    registry = _registry(lambda: [{"label": name, **monitor.report()} for name, monitor in monitors.items()])
    from prometheus_client import start_http_server

    try:
        return start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise AsscError(f"port {port} of {address} cannot be served: {error.strerror or error}") from None
