"""A stored model as an MLflow model, and MLflow's own client with our server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from kindler import Store
from kindler.errors import AlreadyExistsError, NotFoundError, UntrustedError
from tests.serve.served import serving
from tests.tracking.servers import model_server

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.torch

NAMES = ["a", "b", "c"]
X = np.random.default_rng(0).normal(size=(30, 3))
FRAME = pd.DataFrame(X, columns=NAMES)


@pytest.fixture(scope="module")
def om(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    omega = Store(tmp_path_factory.mktemp("store") / "store")
    torch.manual_seed(0)
    omega.models.put(LogisticRegression().fit(FRAME, X[:, 0] > 0), "frame", tag="prod")
    omega.models.put(LogisticRegression().fit(X, X[:, 0] > 0), "matrix")
    omega.models.put(nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=-1)), "torch")
    yield omega
    omega.close()


def loaded(om: Store, name: str, folder: Path, **options: Any) -> Any:
    return mlflow.pyfunc.load_model(str(om.models.export_mlflow(name, folder / "model")), **options)


def test_a_scikit_learn_model_predicts_as_the_stored_one_by_any_of_its_methods(
    om: Store, tmp_path: Path
) -> None:
    model = loaded(om, "frame@prod", tmp_path)
    stored = om.models.get("frame")

    assert model.predict(FRAME[["c", "a", "b"]]).tolist() == stored.predict(FRAME).tolist()
    np.testing.assert_array_equal(
        model.predict(FRAME, params={"method": "predict_proba"}), stored.predict_proba(FRAME)
    )
    assert model.metadata.signature.inputs.input_names() == NAMES
    assert model.metadata.metadata["kindler"] == {"name": "frame", "version": 1, "kind": "sklearn"}


def test_a_torch_model_takes_arrays_and_tables_and_refuses_other_widths(om: Store, tmp_path: Path) -> None:
    model, rows = loaded(om, "torch", tmp_path), X.astype("float32")
    expected = om.models.get("torch")(torch.from_numpy(rows)).detach().numpy()

    np.testing.assert_array_equal(model.predict(rows), expected)
    np.testing.assert_array_equal(model.predict(pd.DataFrame(rows)), expected)
    with pytest.raises(mlflow.exceptions.MlflowException, match="does not match expected shape"):
        model.predict(rows[:, :2])


def test_the_folder_says_what_must_be_installed(om: Store, tmp_path: Path) -> None:
    folder = om.models.export_mlflow("torch", tmp_path / "model")

    wanted = (folder / "requirements.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in wanted} >= {"mlflow", "kindler", "torch", "numpy"}
    assert not [line for line in wanted if "+" in line]
    assert not [file for file in folder.rglob("*") if file.suffix in (".pkl", ".pickle")]


def test_what_is_there_is_not_replaced_and_what_is_not_there_is_not_exported(
    om: Store, tmp_path: Path
) -> None:
    om.models.export_mlflow("matrix", tmp_path / "model")

    with pytest.raises(AlreadyExistsError, match=str(tmp_path / "model")):
        om.models.export_mlflow("matrix", tmp_path / "model")
    with pytest.raises(NotFoundError, match="nothing"):
        om.models.export_mlflow("nothing", tmp_path / "other")


def double(data: Any) -> Any:
    import numpy

    return numpy.asarray(data) * 2


def test_a_model_that_is_code_needs_trust_from_who_writes_and_from_who_loads(
    om: Store, tmp_path: Path
) -> None:
    om.models.put(double, "code")

    with pytest.raises(UntrustedError):
        om.models.export_mlflow("code", tmp_path / "model")
    om.models.export_mlflow("code", tmp_path / "model", trusted=True)
    with pytest.raises(UntrustedError):
        mlflow.pyfunc.load_model(str(tmp_path / "model"))
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"), model_config={"trusted": True})
    np.testing.assert_array_equal(model.predict(X), X * 2)


def test_mlflow_models_serve_answers_as_the_stored_model(om: Store, tmp_path: Path) -> None:
    from mlflow.pyfunc.scoring_server.client import ScoringServerClient

    with model_server(om.models.export_mlflow("frame", tmp_path / "model")) as url:
        client = ScoringServerClient("127.0.0.1", url.rpartition(":")[2])
        answer = client.invoke(FRAME).get_predictions()
        chances = client.invoke(FRAME, params={"method": "predict_proba"}).get_predictions()

    stored = om.models.get("frame")
    assert answer.iloc[:, 0].tolist() == stored.predict(FRAME).tolist()
    np.testing.assert_allclose(chances.to_numpy(), stored.predict_proba(FRAME), rtol=1e-12)


def test_mlflows_own_client_works_with_kindler_serve(om: Store) -> None:
    from mlflow.pyfunc.scoring_server.client import ScoringServerClient

    with serving(om.store.url, "--model", "frame@prod") as served:
        client = ScoringServerClient("127.0.0.1", served.port)
        client.wait_server_ready()
        assert client.get_version()
        answer = client.invoke(FRAME).get_predictions()
        chances = client.invoke(FRAME, params={"method": "predict_proba"}).get_predictions()
        with pytest.raises(Exception, match="error code 400.*are missing"):
            client.invoke(FRAME[["a"]])

    stored = om.models.get("frame")
    assert answer.iloc[:, 0].tolist() == stored.predict(FRAME).tolist()
    np.testing.assert_allclose(chances.to_numpy(), stored.predict_proba(FRAME), rtol=1e-12)
