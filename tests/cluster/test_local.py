"""Clusters on this machine's processes, without Spark."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kindler import cluster
from kindler.errors import ConfigError, DataError, KindlerError, TrainingError, WorkerLostError
from tests.cluster import programs
from tests.conftest import eventually_none, workers
from tests.piped import piped_stdout


def start(program: Any, args: Any = None, nodes: int = 2, **options: Any) -> cluster.Cluster:
    """A cluster that is fed, of programs that use no framework."""
    return cluster.run(program, args, nodes, **{"input_mode": "spark", "framework": None, **options})


def feed_and_shut_down(running: cluster.Cluster, rows: Any) -> None:
    with running:
        running.train({"x": rows})


def test_every_node_knows_who_it_is_and_where_the_others_are() -> None:
    with cluster.run(
        programs.whoami, ["--rate", "0.1"], 2, ps=1, evaluator=True, framework=None, env={"FROM_ENV": "yes"}
    ) as running:
        pass
    chief, worker, *services = running.return_values

    assert [chief["role"], worker["role"]] == ["chief", "worker"]
    assert [chief["index"], worker["index"]] == [0, 0]
    assert [chief["rank"], worker["rank"]] == [0, 1]
    assert chief["workers"] == 2
    assert {role: len(places) for role, places in chief["spec"].items()} == {
        "chief": 1,
        "worker": 1,
        "ps": 1,
        "evaluator": 1,
    }
    assert len({place for places in chief["spec"].values() for place in places}) == 4
    assert chief["args"] == chief["argv"] == ["--rate", "0.1"]
    assert chief["environ"] == {"FROM_ENV": "yes"}
    assert chief["path"].endswith("/data")
    assert chief["remote"] == "s3://bucket/data"
    assert chief["tmp"]
    assert len(services) == 2


def test_rows_are_fed_once_in_each_epoch_and_validation_data_can_be_read_again() -> None:
    with start(programs.epochs, 2) as running:
        running.train({"x": np.arange(300)}, epochs=2, validation={"x": np.arange(25)})
    first, second = running.return_values

    assert [first[0][0], first[1][0]] == [0, 1]
    for epoch in range(2):
        assert first[epoch][1] + second[epoch][1] == 300
    assert {validated for node in (first, second) for _, _, validated in node} == {25}


def test_batches_have_the_size_asked_for_and_every_row_comes_once() -> None:
    with start(programs.add_up, 7) as running:
        running.train(pd.DataFrame({"x": np.arange(500), "other": 1}), columns=["x"])
        running.train(pa.table({"x": np.arange(500, 600)}))
        with pytest.raises(ConfigError, match="still running"):
            _ = running.return_values
    rows = [rows for rows, _, _ in running.return_values]

    assert sum(rows) == 600
    assert min(rows) > 0
    assert sum(total for _, total, _ in running.return_values) == sum(range(600))
    assert all(size == 7 for _, _, sizes in running.return_values for size in sizes[:-1])


def test_an_answer_comes_for_every_row_with_all_columns_in_the_kind_of_the_data() -> None:
    rows = {"x": np.arange(200), "name": np.array([f"n{i}" for i in range(200)])}
    with start(programs.square) as running:
        of_arrays = running.inference(rows, columns=["x"])
        of_pandas = running.inference(pd.DataFrame(rows), pa.schema([("squared", pa.float64())]))
        of_a_list = running.inference([3, 4, 5])

    assert of_arrays.to_pydict() == {
        "x": list(range(200)),
        "name": [f"n{i}" for i in range(200)],
        "result": [i * i for i in range(200)],
    }
    assert of_pandas["squared"].tolist() == [float(i * i) for i in range(200)]
    assert of_pandas["name"].tolist() == rows["name"].tolist()
    assert of_a_list == [9, 16, 25]
    assert sum(running.return_values) == 403


def test_a_program_that_filters_drops_and_repeats_rows() -> None:
    with start(programs.odd_only, nodes=1) as running:
        kept = running.inference({"x": np.arange(100), "y": np.arange(100) * 2}, flat_map=True)

    assert kept["result"].to_pylist() == list(range(1, 100, 2))
    assert kept["y"].to_pylist() == [2 * i for i in range(1, 100, 2)]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", LookupError, "I fail: raise"),
        ("late", LookupError, "I fail: late"),
        ("exit", TrainingError, r"sys\.exit\(3\)"),
        ("hard exit", WorkerLostError, "exit code 3"),
        ("kill", WorkerLostError, "SIGKILL"),
    ],
)
def test_the_failure_of_a_node_reaches_the_driver_and_nothing_is_left(
    how: str, kind: type[Exception], message: str
) -> None:
    rows = np.arange(2_000_000 if how != "late" else 20)
    running = start(programs.fail, how)
    with pytest.raises(kind, match=message) as caught:
        feed_and_shut_down(running, rows)

    assert isinstance(caught.value, KindlerError)
    if how in ("raise", "late"):
        assert "tests/cluster/programs.py" in str(caught.value)
    assert not eventually_none(workers)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (programs.too_few_results, "6 results for a batch of 7 rows"),
        (programs.no_results, "without results for 7 rows"),
    ],
)
def test_a_program_that_answers_too_little_fails_with_that_message(program: Any, message: str) -> None:
    with pytest.raises(DataError, match=message), start(program, nodes=1) as running:
        running.inference({"x": np.arange(50)})


def test_terminate_ends_the_feeding_while_most_rows_are_unread() -> None:
    endless = ({"n": number} for number in iter(int, 1))
    with start(programs.stop_after_100) as running:
        running.train(endless)

    assert running.return_values == [100, 100]


def test_nodes_in_step_get_as_many_batches_although_one_has_more_rows() -> None:
    with start(programs.in_step) as running:
        running.train({"x": np.arange(200)})
    first, second = running.return_values

    assert first == second > 0


def test_an_evaluator_finishes_after_training_has_ended_and_is_stopped_when_it_does_not() -> None:
    options: dict[str, Any] = {"evaluator": True, "framework": None}
    with cluster.run(programs.evaluate, None, 2, ps=1, **options) as running:
        pass
    with cluster.run(programs.evaluate, "for ever", 1, evaluator_grace_s=0.3, **options) as endless:
        pass

    assert running.return_values[:2] == [False, False]
    assert running.return_values[3] == "the last evaluation"
    assert endless.return_values == [False, None]
    with pytest.raises(ConfigError, match="evaluator_grace_s=-1"):
        cluster.run(programs.evaluate, None, 1, evaluator_grace_s=-1)


def test_rows_are_divided_evenly_whatever_their_number() -> None:
    with start(programs.add_up, 7) as running:
        running.train({"x": np.arange(1000)})
        running.train(pd.DataFrame({"x": np.arange(37)}))
    rows = [rows for rows, _, _ in running.return_values]

    assert sum(rows) == 1037
    assert min(rows) > 0.9 * max(rows) - 16


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        start(programs.whoami, nodes=0)
    with pytest.raises(ConfigError, match="main_fun"):
        cluster.run("train.py", None, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="framework='mxnet'"):
        start(programs.whoami, framework="mxnet")
    with pytest.raises(ConfigError, match="input_mode='rdd'"):
        start(programs.whoami, input_mode="rdd")
    with pytest.raises(ConfigError, match="log_dir"):
        start(programs.whoami, tensorboard=True)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        start(programs.whoami, (number for number in ()))


def test_a_stranger_is_not_let_in_and_the_feed_goes_on() -> None:
    with start(programs.add_up, 5, nodes=1) as running:
        node = running.nodes[0]
        with socket.create_connection((node.outside_address, node.ports[1])) as stranger:
            stranger.sendall(json.dumps({"kind": "open"}).encode() * 20)
            stranger.settimeout(20)
            assert len(stranger.recv(1 << 16)) == 32  # the greeting, and nothing after it
            with contextlib.suppress(ConnectionResetError):
                assert not stranger.recv(1)
        running.train({"x": np.arange(10)})

    assert running.return_values[0][:2] == (10, 45)


def test_lines_of_nodes_leave_the_driver_whole() -> None:
    with piped_stdout() as pieces, start(programs.talk, 300, input_mode="program"):
        pass

    assert sorted(pieces) == sorted(
        f"[{role} 0] line {number} of {role}\n" for role in ("chief", "worker") for number in range(300)
    )
