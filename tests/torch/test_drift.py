"""Statistics of training data travel with a model, and tell when it is asked about other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Columns, Estimator, Store
from kindler.errors import ConfigError, DataError, NotFittedError
from tests.serve.served import serving

DRAW = np.random.default_rng(5)


def rows(count: int, age: float = 40) -> dict[str, Any]:
    drawn = {"age": DRAW.normal(age, 9, count).astype("float32"), "plan": DRAW.integers(0, 3, count)}
    return {**drawn, "label": drawn["age"] / 10 + drawn["plan"]}


def fitted(data: Any, *, workers: int = 2, **options: Any) -> Estimator:
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(2, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        loss=torch.nn.MSELoss(),
        engine="local",
        workers=workers,
    )
    columns = Columns(stack_features=True)
    estimator.fit(
        data, feature_cols=["age", "plan"], label_cols="label", columns=columns, verbose=0, **options
    )
    return estimator


@pytest.fixture(scope="module")
def trained() -> Estimator:
    return fitted(rows(6000), validation_data=rows(3000))


def alarms(report: dict[str, Any]) -> list[str]:
    parts = {**report["columns"], **report["predictions"]}
    return [name for name, one in parts.items() if one["alarm"]]


def test_statistics_of_all_workers_are_those_of_the_rows(trained: Estimator) -> None:
    known = trained.statistics
    assert known is not None
    age = known["columns"]["age"]
    assert (age["rows"], age["sampled"]) == (6000, 2048)
    assert age["mean"] == pytest.approx(40, abs=1)
    assert age["std"] == pytest.approx(9, abs=0.6)
    assert dict(known["columns"]["plan"]["categories"]) == pytest.approx(
        dict.fromkeys(range(3), 1 / 3), abs=0.05
    )
    assert known["predictions"]["prediction"]["sampled"] >= 1000


def test_the_sample_is_the_same_in_every_run_and_training_is_as_without(trained: Estimator) -> None:
    data = rows(500)

    assert fitted(data).statistics == fitted(data).statistics


def test_statistics_survive_a_copy_a_file_and_the_store(trained: Estimator, tmp_path: Path) -> None:
    trained.save(tmp_path / "net.estimator")
    with Store(tmp_path / "store") as om:
        version = om.models.put(trained, "net")
        stored = om.models.get("net").statistics
        assert len(json.dumps(dict(version.meta))) < 20_000

    loaded = Estimator.load(tmp_path / "net.estimator", trusted=True).statistics
    assert trained.copy().statistics == loaded == stored == trained.statistics


def test_rows_in_memory_in_files_and_scored_ones_are_compared(trained: Estimator, tmp_path: Path) -> None:
    same, older = rows(2000), rows(2000, age=52)
    table = pa.table({**older, "age": pa.array(older["age"], mask=np.arange(2000) % 10 == 0)})
    pq.write_table(table, tmp_path / "older.parquet")

    assert alarms(trained.drift(same)) == []
    assert alarms(trained.drift({"age": older["age"], "plan": older["plan"]})) == ["age"]
    in_file = trained.drift(tmp_path / "older.parquet")
    assert alarms(in_file) == ["age", "label"]
    assert in_file["columns"]["age"]["missing"] == [0.0, pytest.approx(0.1, abs=0.03)]
    assert "% of the values are missing" in in_file["columns"]["age"]["alarm"]
    scored = trained.predict(pa.table(older), verbose=0)
    assert "prediction" in alarms(trained.drift(scored))


def test_drift_says_what_it_cannot_compare(trained: Estimator) -> None:
    untrained = Estimator.from_torch(
        model=torch.nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss()
    )
    with pytest.raises(NotFittedError, match="has no statistics of its training data"):
        untrained.drift(rows(10))
    with pytest.raises(ConfigError, match="drift needs rows with columns"):
        trained.drift(lambda config, batch_size: None)
    with pytest.raises(ConfigError, match=r"DriftRule\(psi=0\): must be greater than 0"):
        trained.drift(rows(10), psi=0)


def test_a_server_tells_of_shifted_requests_and_of_no_others_and_what_it_logged_says_the_same(
    trained: Estimator, tmp_path: Path
) -> None:
    om = Store(tmp_path / "store")
    om.models.put(trained, "net")
    om.models.put(trained, "calm")
    om.models.put(torch.nn.Linear(2, 1), "bare")
    arguments = ["--log-payloads", "net=1", "--redact-columns", "plan"]
    with (
        serving(om.store.url, *arguments) as served,
        httpx.Client(base_url=served.url, timeout=120) as client,
    ):

        def ask(count: int, age: float, model: str = "net", each: int = 1) -> dict[str, Any]:
            for _ in range(count):
                some = rows(each, age)
                sent = {"instances": np.stack([some["age"], some["plan"]], axis=1).tolist()}
                client.post(f"/v1/models/{model}:predict", json=sent).raise_for_status()
            report: dict[str, Any] = client.get(f"/api/v1/model/{model}/drift").raise_for_status().json()
            return report

        assert ask(1, 40)["alarm"] is False
        quiet = ask(499, 40)
        assert (quiet["alarm"], quiet["sampled"]) == (False, 500), quiet["reasons"]
        loud = ask(500, 55)
        assert alarms(loud) == ["age", "prediction"]
        metrics = client.get("/metrics").text
        assert 'kindler_drift_alarm{model="net",version="1"} 1.0' in metrics
        assert 'kindler_drift_psi{column="age",model="net",part="columns",version="1"}' in metrics
        missing = client.get("/api/v1/model/bare/drift")
        assert (missing.status_code, "no statistics" in missing.text) == (404, True)
        for _ in range(20):  # windows of other rows each: 63 times 8
            calm = ask(63, 40, "calm", each=8)
            assert (calm["alarm"], calm["sampled"]) == (False, 504), calm["reasons"]
        assert served.stop() == 0

    logged = om.datasets.get("payloads/net/1")
    assert logged.num_rows == 1000
    again = trained.drift(logged.slice(500))
    assert alarms(again) == ["age", "prediction"]
    assert {"plan", "label"} <= set(again["unknown"])
    assert again["columns"]["age"]["psi"] == loud["columns"]["age"]["psi"]
    scored = trained.predict({"age": logged["age"].to_numpy(), "plan": np.zeros(1000)}, verbose=0)
    assert scored is not None
    om.close()


def test_a_model_whose_statistics_were_made_up_is_refused_by_store_and_server(
    trained: Estimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = trained.copy()
    monkeypatch.setattr(
        bad, "_statistics", {"format": 1, "columns": {"age": {"rows": -1}}, "predictions": {}}
    )
    om = Store(tmp_path / "store")
    om.models.put(bad, "net")
    with pytest.raises(DataError, match="not statistics of a model"):
        om.models.get("net")
    om.close()
    with serving(tmp_path / "store") as served, httpx.Client(base_url=served.url, timeout=120) as client:
        reply = client.post("/v1/models/net:predict", json={"instances": [[40.0, 1.0]]})
        assert reply.status_code == 503, reply.text
        assert client.get("/api/v1/model/net/drift").status_code == 503
