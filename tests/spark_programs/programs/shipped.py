"""Runs in a small environment that is shipped to a cluster; prints what its executors run in, as JSON.

`python shipped.py MASTER`
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import kindler


def found(args: Any, ctx: Any) -> list[Any]:
    """What a node of a cluster runs in."""
    return [sys.executable, {name: bool(find_spec(name)) for name in args}]


def main(master: str) -> None:
    spark = kindler.init(master, ship="venv", conf={"spark.cores.max": "2"})
    names = ["kindler", "numpy", "pyarrow", "torch"]
    with kindler.cluster.run(found, names, 2, spark=spark, framework=None) as running:
        pass
    again = kindler.init(ship="venv") is spark
    print(json.dumps([again, running.return_values]))  # noqa: T201
    kindler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
