"""PyTorch models behind the server's one face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from kindler import Columns, Estimator, Store
from kindler.models.loaded import load, wrap
from kindler.models.signature import fit
from tests.serve.served import serving

X = np.random.default_rng(0).random((5, 4), np.float32)


class Two(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + right, "product": left * right}


def test_a_stored_module_gives_what_it_gives_in_evaluation(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3))
    om = Store(tmp_path / "store")

    served = load(om.store, om.models.put(model, "net"), trusted=False).predictor

    assert [(s.name, s.dtype, s.shape) for s in served.signature.inputs] == [("input", "float32", (None, 4))]
    (outputs,) = served.call({"input": X}, "predict").values()
    np.testing.assert_allclose(outputs, model.eval()(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


def test_metadata_of_a_stored_estimator_has_its_columns_its_outputs_and_all_versions(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    names, data = ["a", "b", "c", "d"], np.tile(X, (2, 1))
    columns = {name: data[:, i] for i, name in enumerate(names)} | {"y": np.arange(10) % 2}
    for stacked in (True, False):
        estimator = Estimator.from_torch(
            model=torch.nn.Sequential(torch.nn.Linear(4, 2)),
            optimizer=torch.optim.SGD,
            loss=torch.nn.CrossEntropyLoss(),
            workers=1,
            engine="local",
        )
        rows = columns if stacked else {"rows": data, "y": columns["y"]}
        features, read = names if stacked else "rows", Columns(stack_features=stacked)
        estimator.fit(rows, 1, 5, feature_cols=features, label_cols="y", columns=read, verbose=0)
        om.models.put(estimator, "est")
    om.close()
    with serving(tmp_path / "store") as served, httpx.Client(base_url=served.url, timeout=120) as client:
        told = [client.get(f"/v2/models/est/versions/{version}").json() for version in (1, 2)]
        outputs = [{"name": "output_0", "datatype": "FP32", "shape": [-1, 2]}]
        assert [one["versions"] for one in told] == [["1", "2"]] * 2
        assert [one["outputs"] for one in told] == [outputs] * 2
        assert told[0]["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1]} for name in names]
        assert told[1]["inputs"] == [{"name": "rows", "datatype": "FP32", "shape": [-1, 4]}]

        def answer(inputs: dict[str, Any], version: int) -> Any:
            sent = [
                {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
                for name, array in inputs.items()
            ]
            reply = client.post(f"/v2/models/est/versions/{version}/infer", json={"inputs": sent})
            return reply.raise_for_status().json()["outputs"][0]["data"]

        apart = answer({name: X[:, i] for i, name in enumerate(names)}, 1)
        assert apart == answer({"input": X}, 1)
        assert len(answer({"rows": X}, 2)) == 10


def test_whole_numbers_become_floats_unless_a_table_is_looked_up() -> None:
    whole = np.array([[1, 2, 3, 4]])

    linear = wrap(torch.nn.Sequential(torch.nn.Linear(4, 1))).predictor
    assert fit(linear.signature, {"": whole})["input"].dtype == np.float32

    looked_up = wrap(torch.nn.Sequential(torch.nn.Embedding(9, 2))).predictor
    (outputs,) = looked_up.call(fit(looked_up.signature, {"": whole}), "predict").values()
    assert outputs.shape == (1, 4, 2)


def test_arguments_and_results_keep_their_names() -> None:
    served = wrap(Two()).predictor

    assert served.signature.names == ("left", "right")
    outputs = served.call({"left": X, "right": X}, "predict")
    np.testing.assert_array_equal(outputs["product"], X * X)
