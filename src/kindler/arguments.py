"""Whether arguments can work: each function gives its complaints, and `refuse` raises all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kindler.errors import ConfigError

__all__ = [
    "at_least_one",
    "backend_complaints",
    "callback_complaints",
    "engine_complaints",
    "ingest_complaints",
    "needs",
    "refuse",
]


def refuse(*complaints: str) -> None:
    """All that is wrong at once, so that nobody mends one argument only to hear of the next."""
    if complaints:
        raise ConfigError(complaints[0] if len(complaints) == 1 else "\n".join(f"- {c}" for c in complaints))


def engine_complaints(workers: int | None, engine: str) -> list[str]:
    found = []
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        found.append(f"workers must be at least 1, or None for all slots; received {workers!r}.")
    if engine not in ("auto", "local", "spark"):
        found.append(f"engine must be 'auto', 'local' or 'spark'; received {engine!r}.")
    return found


def backend_complaints(backend: str | None) -> list[str]:
    known = ("bigdl", "torch_distributed", "horovod", "spark", "ray")
    if backend is None or backend in known:
        return []
    return [f"backend={backend!r} is none of Orca's {list(known)}; leave it out, Kindler needs none."]


def ingest_complaints(ingest: str) -> list[str]:
    if ingest in ("auto", "inline", "direct"):
        return []
    return [f"ingest must be 'auto', 'inline' or 'direct'; received {ingest!r}."]


def at_least_one(**given: int | None) -> list[str]:
    return [
        f"{name} must be a whole number of at least 1; received {value!r}."
        for name, value in given.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]


def needs(spec: Any, *names: str) -> list[str]:
    return [
        f"this needs {_an(name)}; give one to Estimator.from_torch({name}=...)."
        for name in names
        if getattr(spec, name) is None
    ]


def _an(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def callback_complaints(callbacks: Sequence[Any] | None) -> list[str]:
    from kindler.train.callbacks import Callback

    return [
        f"callbacks must be kindler.Callback objects; received {item!r}."
        for item in callbacks or ()
        if not isinstance(item, Callback)
    ]
