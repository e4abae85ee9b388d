"""Which points a suite tries: a sample, all (KINDLER_TEST_WHOLE=1), or one (KINDLER_TEST_POINT)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

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
