"""Run settings: frozen, keyword-only, units in the names, valid once built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kindler.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How a gang of workers is started, watched and ended.

    Attributes:
        start_timeout_s: Seconds for all workers to start, including the wait for executors.
        heartbeat_s: Seconds between a worker's heartbeats.
        heartbeat_timeout_s: Seconds of silence after which a worker counts as lost.
        sync_timeout_s: Seconds a worker waits for the others at an exchange.
        stall_timeout_s: Seconds without a step, an exchange or a report from any worker after which the run
            fails with the stacks of all of them.
        stop_timeout_s: Seconds for workers to end once they were asked to.
        max_failures: How often a run that lost a worker restarts from its last checkpoint.
        retry_backoff_s: Seconds before the first restart; doubled each time, up to 30.
        executor_wait_s: Seconds to wait for the replacement of a lost executor; after that the run continues
            with fewer workers until it is back.
        idle_s: Seconds that warm processes wait for the next run; 0 keeps none.
        threads: Compute threads per worker; None shares a machine's cores among its workers.
        shared_memory: Whether workers of one machine exchange through shared memory.
        rendezvous: Where workers meet: at the driver (live logs and progress), or among themselves if they
            cannot reach it, as with a remote Spark Connect client.
        port_range: The first and last TCP port that Kindler may listen on, on the driver and on workers,
            where a firewall or a container allows only some; None is any free port.

    >>> RunSettings(heartbeat_s=0)
    Traceback (most recent call last):
    kindler.errors.ConfigError: RunSettings(heartbeat_s=0): heartbeat_s must be more than 0.
    """

    start_timeout_s: float = 120.0
    heartbeat_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    sync_timeout_s: float = 1800.0
    stall_timeout_s: float = 1800.0
    stop_timeout_s: float = 10.0
    max_failures: int = 3
    retry_backoff_s: float = 1.0
    executor_wait_s: float = 300.0
    idle_s: float = 300.0
    threads: int | None = None
    shared_memory: bool = True
    rendezvous: Literal["auto", "driver", "workers"] = "auto"
    port_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (value > 0 or (field.name == "idle_s" and value == 0)):
                raise ConfigError(f"RunSettings({field.name}={value}): {field.name} must be more than 0.")
        if self.max_failures < 0:
            raise ConfigError(f"RunSettings(max_failures={self.max_failures}): must be 0 or more.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"RunSettings(threads={self.threads}): threads must be at least 1.")
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            raise ConfigError(
                f"RunSettings(heartbeat_s={self.heartbeat_s},"
                f" heartbeat_timeout_s={self.heartbeat_timeout_s}):"
                " the timeout must be longer than the interval."
            )
        if self.rendezvous not in ("auto", "driver", "workers"):
            raise ConfigError(
                f"RunSettings(rendezvous={self.rendezvous!r}): rendezvous is 'auto', 'driver' or 'workers'."
            )
        if self.port_range is not None and not _is_port_range(self.port_range):
            raise ConfigError(
                f"RunSettings(port_range={self.port_range!r}): port_range is (first, last), whole numbers"
                " from 1 to 65535, the first not above the last."
            )


def _is_port_range(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    if not all(isinstance(port, int) and not isinstance(port, bool) for port in value):
        return False
    first, last = value
    return bool(1 <= first <= last <= 65535)
