"""Clusters of a Spark Connect session, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.cluster import programs
from tests.in_turn import run_in_turn
from tests.whole import whole_only


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main() -> None:
    import kindler
    from kindler import cluster

    spark = kindler.init(cores=2, conf={"spark.api.mode": "connect"})
    fed: dict[str, Any] = {"spark": spark, "input_mode": "spark", "framework": None}
    with cluster.run(programs.square, None, 2, **fed) as running:
        rows = running.inference(spark.range(0, 100, 1, 4), "square long").toPandas()
    say(len(rows), int(rows["square"].sum()), sum(running.return_values))
    with cluster.run(programs.stop_after_100, None, 2, **fed) as running:
        running.train(spark.range(0, 1_000_000, 1, 200), epochs=100)
    say(*running.return_values)
    with cluster.run(programs.whoami, None, 2, spark=spark, framework=None) as running:
        pass
    say(*(value["role"] for value in running.return_values))
    kindler.stop()


@whole_only
def test_a_connect_session_feeds_nodes_and_is_stopped_by_them(tmp_path: Path) -> None:
    printed = run_in_turn(tmp_path, (Path(__file__),), SPARK_TESTING="1", paths=[Path(__file__).parents[2]])
    lines = [line for line in printed(Path(__file__).name).splitlines() if not line.startswith("[")]

    assert lines[-3:] == [f"100 {sum(n * n for n in range(100))} 100", "100 100", "chief worker"]


if __name__ == "__main__":
    main()
