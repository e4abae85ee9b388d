"""Which points a suite tries: a sample, all (KINDLER_TEST_WHOLE=1), or one (KINDLER_TEST_POINT)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.faults.kernel import Fault, Point
from tests.whole import WHOLE

tried: Counter[str] = Counter()
"""How many points each suite has tried."""

# Where a kind of fault says nothing else than another one, it is left out.
APPLIES = {
    "torn": ("write", "send"),
    "short": ("write", "send"),
    "full": ("create", "write", "mkdir", "link"),
}


def faults(suite: str, kind: str, points: Sequence[Point], *, sample: int) -> Iterator[tuple[str, Fault]]:
    """The faults of one kind at these points, each with its name, such as "put:kill:17"."""
    few = [k for k, point in enumerate(points) if point.kind in APPLIES.get(kind, (point.kind,))]
    only = os.environ.get("KINDLER_TEST_POINT", "")
    if not (WHOLE or only) and len(few) > sample:
        few = [few[i * len(few) // sample] for i in range(sample)]
    for k in few:
        name = f"{suite}:{kind}:{k}"
        if not only or name in only.split(","):
            tried[suite] += 1
            yield name, Fault(k, kind)


def grouped_faults(
    suite: str, kind: str, points: Sequence[Point], group: Callable[[Point], str], *, sample: int
) -> Iterator[tuple[str, Fault, Point]]:
    """The same where several processes run at once: points count within their group, of which each is told.

    A sample has points of all groups.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(group(point), []).append(point)
    each = max(1, sample // len(groups))
    for name, members in sorted(groups.items()):
        for label, fault in faults(f"{suite}:{name}", kind, members, sample=each):
            yield label, fault, members[fault.k]


@contextmanager
def told(name: str, point: Point, failures: list[str]) -> Iterator[None]:
    """Note what fails, so that one run shows all points that do."""
    try:
        yield
    except Exception as exc:
        print(f"{name} {point}: {type(exc).__name__}: {exc}")  # noqa: T201
        failures.append(f"{name} {point}\n{type(exc).__name__}: {exc}\n")
