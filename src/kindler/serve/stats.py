"""What a server counts, each figure once: Prometheus, Triton's statistics and the web page read the same."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from kindler.sandbox.process import ProcessLost
from kindler.serve.batching import CallStats
from kindler.store import Version

_RECENT = 2048
_MAX_VERSIONS = 1000  # whose counters are kept
_MAX_SIZES = 256  # of batches that are counted apart
_SAMPLES = 512  # latencies that are kept of one second, for all models together
_WINDOW_S = 60
_BUSY = (413, 429, 503)
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Histogram:
    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return buckets


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    failures: int = 0
    latencies: list[float] = field(default_factory=list)


class _Live:
    """The last minute, second by second with so many latencies of each, and those of the last requests."""

    def __init__(self, samples: int = 0) -> None:
        self._samples = samples
        self._seconds: deque[_Second] = deque(maxlen=_WINDOW_S + 1)
        self._latencies: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float, *, failed: bool) -> None:
        now = int(time.monotonic())
        if not self._seconds or self._seconds[-1].number != now:
            self._seconds.append(_Second(now))
        current = self._seconds[-1]
        current.requests += 1
        current.failures += failed
        if len(current.latencies) < self._samples:
            current.latencies.append(seconds)
        self._latencies.append(seconds)

    def view(self) -> dict[str, Any]:
        now = int(time.monotonic())
        known = {second.number: second for second in self._seconds}
        minute = [known.get(now - i, _Second(0)) for i in range(_WINDOW_S, 0, -1)]
        p50, p90, p99 = _percentiles(self._latencies or [0.0], 50, 90, 99)
        view: dict[str, Any] = {
            "requests_per_second": sum(second.requests for second in minute[-5:]) / 5,
            "requests_last_minute": sum(second.requests for second in minute),
            "failures_last_minute": sum(second.failures for second in minute),
            "per_second": [second.requests for second in minute],
            "latency_ms": {"p50": p50, "p90": p90, "p99": p99},
        }
        if self._samples:
            each = [_percentiles(s.latencies, 50, 99) if s.latencies else (None, None) for s in minute]
            p50s, p99s = zip(*each, strict=True)
            view["latency_ms_per_second"] = {"p50": p50s, "p99": p99s}
        return view


def _percentiles(seconds: Iterable[float], *which: int) -> list[float]:
    """Of seconds, in milliseconds."""
    return [round(float(value) * 1e3, 3) for value in np.percentile(list(seconds), which)]


class ModelStats:
    def __init__(self) -> None:
        self.live = _Live()
        self.batch_rows = _Histogram(_ROWS)
        self.call_seconds, self.queue_seconds = _Histogram(_SECONDS), _Histogram(_SECONDS)
        self.failures = self.batched_requests = 0
        self.first_token_seconds, self.token_seconds = _Histogram(_SECONDS), _Histogram(_SECONDS)
        self.prompt_tokens = self.generated_tokens = self.running_answers = self.waiting_answers = 0
        self.answers: Counter[str] = Counter()  # by how they ended

    def view(self) -> dict[str, Any]:
        batches = sum(self.batch_rows.counts)
        return {
            **self.live.view(),
            "rows": int(self.batch_rows.sum),
            "batches": batches,
            "requests_per_batch": round(self.batched_requests / batches, 2) if batches else 0.0,
        }


class VersionStats:
    """The counters of one version of a model, since the server has started.

    Attributes:
        seconds: What its requests took together, from arrival to answer; `failed_seconds` those that failed.
        batches: Calls; `rows`, `call_seconds` and `queue_seconds` (of the first request of each) are of all.
        by_rows: For each number of rows in a call, how many calls there were and what they took.
        last: When it last answered, in seconds since 1970; 0 for never.
        shadows: Shadow calls by outcome: "same", "different", "failed" or "dropped".
        restarts: Processes that were replaced, by reason: "crashed", "hung" or "memory".
        payloads: Rows that were drawn to be logged, by outcome: "written", or why they were dropped.
    """

    def __init__(self, model: ModelStats) -> None:
        self.model = model
        self.requests = self.failures = self.batches = self.rows = 0
        self.seconds = self.failed_seconds = self.call_seconds = self.queue_seconds = 0.0
        self.by_rows: dict[int, list[float]] = {}
        self.last = 0.0
        self.shadows: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.payloads: Counter[str] = Counter()

    def answered(self, seconds: float, *, failed: bool) -> None:
        self.model.live.add(seconds, failed=failed)
        self.requests += 1
        self.seconds += seconds
        if failed:
            self.failures += 1
            self.failed_seconds += seconds
        self.last = time.time()

    def called(self, call: CallStats) -> None:
        model = self.model
        model.batch_rows.add(call.rows)
        model.call_seconds.add(call.seconds)
        model.queue_seconds.add(call.waited_s)
        model.batched_requests += call.requests
        model.failures += call.failed
        self.batches += 1
        self.rows += call.rows
        self.call_seconds += call.seconds
        self.queue_seconds += call.waited_s
        if call.rows in self.by_rows or len(self.by_rows) < _MAX_SIZES:
            counted = self.by_rows.setdefault(call.rows, [0, 0.0])
            counted[0] += 1
            counted[1] += call.seconds

    def lost(self, why: ProcessLost) -> None:
        self.restarts["hung" if why.hung else "memory" if why.by_memory else "crashed"] += 1

    def view(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failures": self.failures,
            "rows": self.rows,
            "batches": self.batches,
            "mean_ms": round(self.seconds / max(1, self.requests) * 1e3, 3),
            "shadow": dict(self.shadows),
            "restarts": dict(self.restarts),
        }


class Stats:
    """All counters of a server; for Prometheus it is a collector."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, _Histogram] = defaultdict(lambda: _Histogram(_SECONDS))
        self.loads: Counter[str] = Counter()
        self.drift: Callable[[], Iterable[tuple[str, int, Mapping[str, Any]]]] = lambda: ()
        self.loaded = self.loaded_bytes = self.waiting = 0
        self._on_devices: list[tuple[str, int, str, int]] = []
        self.live = _Live(_SAMPLES)
        self.models: dict[str, ModelStats] = {}
        self.versions: OrderedDict[tuple[str, int], VersionStats] = OrderedDict()
        self.started = time.time()

    def version(self, name: str, number: int) -> VersionStats:
        known = self.versions.get((name, number))
        if known is None:
            model = self.models.setdefault(name, ModelStats())
            known = self.versions[name, number] = VersionStats(model)
            if len(self.versions) > _MAX_VERSIONS:  # of those that nobody asks for any more
                (oldest, _), _ = self.versions.popitem(last=False)
                if not any(other == oldest for other, _ in self.versions):
                    self.models.pop(oldest, None)
        return known

    def answered(
        self, protocol: str, status: int, seconds: float, model: str | None, version: int | None
    ) -> None:
        self._requests[protocol, status] += 1
        self._seconds[protocol].add(seconds)
        failed = status >= 400 and status not in (401, 403)  # auth failures do not count as model failures
        self.live.add(seconds, failed=failed)
        if model is not None and version is not None:
            self.version(model, version).answered(seconds, failed=failed)

    def count_loaded(self, loaded: Iterable[tuple[str, int, int, str | None, int]]) -> None:
        """All loaded versions: name, number, bytes, device and bytes there."""
        versions = list(loaded)
        self.loaded = len(versions)
        self.loaded_bytes = sum(size for _, _, size, _, _ in versions)
        self._on_devices = [
            (name, number, device, size) for name, number, _, device, size in versions if device
        ]

    def exposition(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`'s collectors."""
        models, versions = self.models.items(), self.versions.items()
        statuses = {status: sum(n for (_, s), n in self._requests.items() if s == status) for status in _BUSY}
        outcomes = {
            (*key, outcome): count
            for key, v in versions
            for outcome, count in (("answered", v.requests - v.failures), ("failed", v.failures))
        }
        shadows = {(*key, outcome): n for key, v in versions for outcome, n in v.shadows.items()}
        payloads = {(*key, outcome): n for key, v in versions for outcome, n in v.payloads.items()}
        restarts = {(*key, reason): n for key, v in versions for reason, n in v.restarts.items()}
        failures = {name: model.failures for name, model in models}
        outcome, reason = "model version outcome", "model version reason"
        yield _counter("requests", "Requests", "protocol status", self._requests)
        yield _histogram("request_seconds", "Seconds until the response", "protocol", self._seconds.items())
        for name, text, attribute in (
            ("batch_rows", "Rows per model call", "batch_rows"),
            ("model_seconds", "Seconds per model call", "call_seconds"),
            ("queue_seconds", "Seconds in the queue before a model call", "queue_seconds"),
            ("first_token_seconds", "Seconds until the first token of an answer", "first_token_seconds"),
            ("token_seconds", "Seconds between two tokens of an answer", "token_seconds"),
        ):
            yield _histogram(name, text, "model", [(model, getattr(m, attribute)) for model, m in models])
        for name, text in (
            ("prompt_tokens", "Tokens of prompts and of embedded texts"),
            ("generated_tokens", "Tokens of answers"),
        ):
            yield _counter(name, text, "model", {model: getattr(m, name) for model, m in models})
        ended = {(model, reason): n for model, m in models for reason, n in m.answers.items()}
        yield _counter("answers", "Answers to prompts by how they ended", "model reason", ended)
        for name, text in (
            ("running_answers", "Answers that are being generated"),
            ("waiting_answers", "Prompts that wait to be answered"),
        ):
            gauge = GaugeMetricFamily(f"kindler_{name}", text, labels=["model"])
            for model, m in models:
                gauge.add_metric([model], getattr(m, name))
            yield gauge
        yield _counter("model_failures", "Model calls that raised an error", "model", failures)
        yield _counter("version_requests", "Requests to a model version", outcome, outcomes)
        yield _counter("payload_rows", "Rows that were drawn to be logged", outcome, payloads)
        yield _counter("shadow_requests", "Shadow calls to a model version", outcome, shadows)
        text = "Processes of a model version that were lost and replaced"
        yield _counter("process_restarts", text, reason, restarts)
        yield _counter("refused", "Requests rejected before they were queued", "status", statuses)
        yield _counter("loads", "Models loaded", "outcome", self.loads)
        yield GaugeMetricFamily("kindler_loaded_models", "Models in memory", self.loaded)
        yield GaugeMetricFamily("kindler_loaded_bytes", "Bytes of models in memory", self.loaded_bytes)
        text, labels = "Bytes of GPU memory that a model version uses", ("model", "version", "device")
        on_devices = GaugeMetricFamily("kindler_device_bytes", text, labels=labels)
        for name, number, device, size in self._on_devices:
            on_devices.add_metric([name, str(number), device], size)
        yield on_devices
        yield from _drift(list(self.drift()))
        yield GaugeMetricFamily("kindler_waiting_rows", "Rows waiting for a model call", self.waiting)


def shown_name(version: Version) -> str:
    """A model's name in counters and settings: that of another bucket begins with the bucket's."""
    return version.name if version.bucket == "default" else f"{version.bucket}:{version.name}"


def _drift(reports: Sequence[tuple[str, int, Mapping[str, Any]]]) -> Iterator[Metric]:
    """The last reports of models, versions and what is in them."""
    text = "1 if the input or the predictions of a model version differ from those of its training"
    alarms = GaugeMetricFamily("kindler_drift_alarm", text, labels=["model", "version"])
    labels = ["model", "version", "part", "column"]
    texts = {
        "psi": "Population stability index",
        "ks": "Kolmogorov-Smirnov distance",
        "new": "New categories",
    }
    figures = {
        name: GaugeMetricFamily(f"kindler_drift_{name}", t, labels=labels) for name, t in texts.items()
    }
    missing = GaugeMetricFamily("kindler_drift_missing", "Share of missing values", labels=labels)
    for model, number, report in reports:
        alarms.add_metric([model, str(number)], float(report["alarm"]))
        for part in ("columns", "predictions"):
            for column, one in report[part].items():
                where = [model, str(number), part, column]
                missing.add_metric(where, one["missing"][1])
                for name, family in figures.items():
                    family.add_metric(where, one[name])
    yield from (alarms, missing, *figures.values())


def _counter(name: str, text: str, labels: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"kindler_{name}", text, labels=labels.split())
    for key, count in counts.items():
        if count:
            family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], count)
    return family


def _histogram(name: str, text: str, label: str, samples: Iterable[tuple[str, _Histogram]]) -> Metric:
    family = HistogramMetricFamily(f"kindler_{name}", text, labels=[label])
    for value, histogram in samples:
        family.add_metric([value], histogram.buckets(), histogram.sum)
    return family
