"""What a server counts: for Prometheus, and for people who watch it live."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kindler.sandbox.process import ProcessLost
from kindler.serve.batching import Measured

_RECENT = 2048
_MOST_VERSIONS = 1000  # whose counters are kept
_MOST_SIZES = 256  # of batches that are counted apart
_SAMPLES = 512  # latencies that are kept of one second, for all models together
_WINDOW_S = 60
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Second:
    """What happened in one second."""

    __slots__ = ("failures", "latencies", "number", "percentiles", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.failures = 0
        self.latencies: list[float] = []
        self.percentiles: tuple[float, float] | None = None

    def p50_p99(self) -> tuple[float, float]:
        """In milliseconds. For a second that is over: reckoned once, and only if somebody looks."""
        if self.percentiles is None:
            ordered = sorted(self.latencies)
            last = len(ordered) - 1
            at = (ordered[last // 2], ordered[round(last * 0.99)])
            self.percentiles = (round(at[0] * 1e3, 3), round(at[1] * 1e3, 3))
            self.latencies = []
        return self.percentiles


class _Live:
    """The last minute, second by second, and the latencies of the last requests.

    Args:
        samples: How many latencies are kept of each second; `latencies` needs some.
    """

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

    def latencies(self) -> dict[str, list[float | None]]:
        """Milliseconds, for each second of the last minute; None for one without requests."""
        now = int(time.monotonic())
        by_second = {entry.number: entry.p50_p99() for entry in self._seconds if entry.number < now}
        each = [by_second.get(now - i, (None, None)) for i in range(_WINDOW_S, 0, -1)]
        return {"p50": [p50 for p50, _ in each], "p99": [p99 for _, p99 in each]}

    def shown(self) -> dict[str, Any]:
        now = int(time.monotonic())
        recent = [entry for entry in self._seconds if now - _WINDOW_S <= entry.number < now]
        rates = {entry.number: entry.requests for entry in recent}
        latencies = np.array(self._latencies or [0.0]) * 1e3
        p50, p90, p99 = np.percentile(latencies, [50, 90, 99])
        return {
            "requests_per_second": sum(rates.get(now - i, 0) for i in range(1, 6)) / 5,
            "requests_last_minute": sum(entry.requests for entry in recent),
            "failures_last_minute": sum(entry.failures for entry in recent),
            "per_second": [rates.get(now - i, 0) for i in range(_WINDOW_S, 0, -1)],
            "latency_ms": {"p50": round(p50, 3), "p90": round(p90, 3), "p99": round(p99, 3)},
        }


class ModelStats:
    """The counters of one model, found once and not by name for each request."""

    def __init__(self, stats: Stats, name: str) -> None:
        self.live = _Live()
        self._batch_rows = stats.batch_rows.labels(name)
        self._call = stats.call_seconds.labels(name)
        self._queue = stats.queue_seconds.labels(name)
        self._failures = stats.failures.labels(name)
        self.batches = self.batched_requests = self.rows = 0

    def measured(self, call: Measured) -> None:
        self._batch_rows.observe(call.rows)
        self._call.observe(call.seconds)
        self._queue.observe(call.waited_s)
        self.batches += 1
        self.batched_requests += call.requests
        self.rows += call.rows
        if call.failed:
            self._failures.inc()

    def shown(self) -> dict[str, Any]:
        return {
            **self.live.shown(),
            "rows": self.rows,
            "batches": self.batches,
            "requests_per_batch": round(self.batched_requests / self.batches, 2) if self.batches else 0.0,
        }


class VersionStats:
    """The counters of one version of a model, since the server has started.

    Attributes:
        model: The counters of its model.
        requests: Requests that it answered, also those that failed.
        failures: Those that failed.
        seconds: What they took together, from arrival to answer.
        failed_seconds: What those took that failed.
        batches: Calls.
        rows: Rows in all calls.
        call_seconds: What the calls took together.
        queue_seconds: What the first request of each call had waited, together.
        by_rows: For each number of rows in a call, how many calls there were and what they took.
        last: When it last answered, in seconds since 1970; 0 for never.
        shadowed: Shadow calls by outcome: "same", "different", "failed" or "dropped".
        restarts: Processes that were replaced, by what had happened: "crashed", "hung" or "memory".
    """

    def __init__(self, stats: Stats, name: str, number: int) -> None:
        self.model = stats.model(name)
        self._requests = stats.version_requests
        self._labels = (name, str(number))
        self._shadows = stats.shadows
        self.requests = self.failures = self.batches = self.rows = 0
        self.seconds = self.failed_seconds = self.call_seconds = self.queue_seconds = 0.0
        self.by_rows: dict[int, list[float]] = {}
        self.last = 0.0
        self.shadowed: dict[str, int] = {}
        self._restarts = stats.restarts
        self.restarts: dict[str, int] = {}

    def answered(self, seconds: float, *, failed: bool) -> None:
        """A request of this version was answered."""
        self.requests += 1
        self.seconds += seconds
        if failed:
            self.failures += 1
            self.failed_seconds += seconds
        self.last = time.time()
        self._requests.labels(*self._labels, "failed" if failed else "answered").inc()

    def measured(self, call: Measured) -> None:
        self.model.measured(call)
        self.batches += 1
        self.rows += call.rows
        self.call_seconds += call.seconds
        self.queue_seconds += call.waited_s
        if call.rows in self.by_rows or len(self.by_rows) < _MOST_SIZES:
            counted = self.by_rows.setdefault(call.rows, [0, 0.0])
            counted[0] += 1
            counted[1] += call.seconds

    def shadow(self, outcome: str) -> None:
        """A shadow call of this version has ended."""
        self.shadowed[outcome] = self.shadowed.get(outcome, 0) + 1
        self._shadows.labels(*self._labels, outcome).inc()

    def lost(self, why: ProcessLost) -> None:
        """A process of this version was lost, and is replaced."""
        reason = "hung" if why.hung else "memory" if why.by_memory else "crashed"
        self.restarts[reason] = self.restarts.get(reason, 0) + 1
        self._restarts.labels(*self._labels, reason).inc()

    def forget(self) -> None:
        """Take its figures out of what Prometheus reads."""
        for counter, outcomes in (
            (self._requests, ("answered", "failed")),
            (self._shadows, tuple(self.shadowed)),
            (self._restarts, tuple(self.restarts)),
        ):
            for outcome in outcomes:
                with suppress(KeyError):
                    counter.remove(*self._labels, outcome)

    def shown(self) -> dict[str, Any]:
        answered = max(1, self.requests)
        return {
            "requests": self.requests,
            "failures": self.failures,
            "rows": self.rows,
            "batches": self.batches,
            "mean_ms": round(self.seconds / answered * 1e3, 3),
            "shadow": dict(self.shadowed),
            "restarts": dict(self.restarts),
        }


class Stats:
    """All counters of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("kindler_requests", "Requests", ["protocol", "status"], **options)
        self._seconds = Histogram(
            "kindler_request_seconds", "Seconds until the answer", ["protocol"], buckets=_SECONDS, **options
        )
        self.batch_rows = Histogram(
            "kindler_batch_rows", "Rows in a call of a model", ["model"], buckets=_ROWS, **options
        )
        self.call_seconds = Histogram(
            "kindler_model_seconds", "Seconds in a call of a model", ["model"], buckets=_SECONDS, **options
        )
        self.queue_seconds = Histogram(
            "kindler_queue_seconds",
            "Seconds before a call of a model",
            ["model"],
            buckets=_SECONDS,
            **options,
        )
        self.failures = Counter(
            "kindler_model_failures", "Calls of a model that raised", ["model"], **options
        )
        versions = ["model", "version", "outcome"]
        self.version_requests = Counter(
            "kindler_version_requests", "Requests that a version of a model answered", versions, **options
        )
        self.shadows = Counter(
            "kindler_shadow_requests", "Shadow calls of a version of a model", versions, **options
        )
        self.restarts = Counter(
            "kindler_process_restarts",
            "Processes of a version of a model that were lost and replaced",
            ["model", "version", "reason"],
            **options,
        )
        self.refused = Counter("kindler_refused", "Requests that were not queued", ["status"], **options)
        self.loads = Counter("kindler_loads", "Models loaded", ["outcome"], **options)
        self.loaded = Gauge("kindler_loaded_models", "Models in memory", **options)
        self.loaded_bytes = Gauge("kindler_loaded_bytes", "Bytes of models in memory", **options)
        self._device_bytes = Gauge(
            "kindler_device_bytes",
            "Bytes of a GPU that a version of a model takes",
            ["model", "version", "device"],
            **options,
        )
        self.waiting = Gauge("kindler_waiting_rows", "Rows that wait", **options)
        self._children: dict[tuple[str, int], tuple[Any, Any]] = {}
        self.live = _Live(_SAMPLES)
        self.models: dict[str, ModelStats] = {}
        self.versions: OrderedDict[tuple[str, int], VersionStats] = OrderedDict()
        self.started = time.time()

    def model(self, name: str) -> ModelStats:
        """The counters of a model."""
        if name not in self.models:
            self.models[name] = ModelStats(self, name)
        return self.models[name]

    def version(self, name: str, number: int) -> VersionStats:
        """The counters of a version of a model."""
        found = self.versions.get((name, number))
        if found is None:
            found = self.versions[name, number] = VersionStats(self, name, number)
            if len(self.versions) > _MOST_VERSIONS:  # of those that nobody asks for any more
                _, oldest = self.versions.popitem(last=False)
                oldest.forget()
        return found

    def answered(
        self, protocol: str, status: int, seconds: float, model: str | None, version: int | None = None
    ) -> None:
        """A request was answered."""
        key = (protocol, status)
        child = self._children.get(key)
        if child is None:
            child = self._requests.labels(protocol, str(status)), self._seconds.labels(protocol)
            self._children[key] = child
        child[0].inc()
        child[1].observe(seconds)
        failed = status >= 400 and status not in (401, 403)  # who may not ask has found nothing wrong
        self.live.add(seconds, failed=failed)
        if model is not None:
            self.model(model).live.add(seconds, failed=failed)
            if version is not None:
                self.version(model, version).answered(seconds, failed=failed)
        if status in (413, 429, 503):
            self.refused.labels(str(status)).inc()

    def count_devices(self, loaded: Iterable[tuple[str, int, str | None, int]]) -> None:
        """Where versions compute: name, number, device and bytes there, of all that are loaded."""
        self._device_bytes.clear()
        for name, number, device, size in loaded:
            if device is not None:
                self._device_bytes.labels(name, str(number), device).set(size)

    def exposition(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self.registry)
