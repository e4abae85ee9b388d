"""A stored transform in the server: pictures arrive as bytes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator, Prepare, Store
from kindler.errors import DataError, UntrustedError
from kindler.models.loaded import load
from kindler.models.signature import fit as fit_inputs
from kindler.serve.protocols import RawRequest, Target
from kindler.serve.protocols.tfserving import TfServing
from tests.torch.test_transform import classifier, pictures

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]


def test_a_transform_is_stored_as_code_and_served_bytes(tmp_path: Path) -> None:
    table, _ = pictures(6)
    est = classifier(workers=1)
    signature = {**est.signature, "feature_cols": "png", "label_cols": "label"}
    layout = {"png": ["bytes", []], "label": ["int64", []]}
    est._restore_record({"signature": {**signature, "layout": layout}, "history": []})
    expected = est.predict(table, verbose=0).column("prediction").to_pylist()
    om = Store(tmp_path / "store")
    version = om.models.put(est, "images")

    with pytest.raises(UntrustedError, match="(?s)its transform, collate or padding is code.*trusted=True"):
        om.models.get("images")
    again = om.models.get("images", trusted=True, workers=1)
    assert again._prepare.transform == est._prepare.transform
    assert again.predict(table, verbose=0).column("prediction").to_pylist() == expected

    served = load(om.store, version, trusted=True).predictor
    sent = [{"png": {"b64": base64.b64encode(data).decode()}} for data in table.column("png").to_pylist()]
    body = json.dumps({"instances": sent}).encode()
    request = TfServing().decode(RawRequest(body, {}, {}), served.signature, Target("images", None))
    (outputs,) = served.call(fit_inputs(served.signature, request.inputs), "predict").values()
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    with pytest.raises(DataError, match="column 'png', row 0: cannot be read as an image"):
        served(np.array([b"oops"], object))


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"] * 2}


def _as_they_are(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"]}


def test_two_functions_of_one_module_are_stored_with_its_code(tmp_path: Path) -> None:
    est = Estimator.from_torch(
        model=torch.nn.Linear(2, 1),
        prepare=Prepare(transform=_doubled, eval_transform=_as_they_are),
        workers=1,
    )
    layout = {"x": ["float32", [2]]}
    signature = {**est.signature, "feature_cols": "x", "layout": layout}
    est._restore_record({"signature": signature, "history": [{"epoch": 1}]})
    om = Store(tmp_path / "store")
    om.models.put(est, "net")

    again = om.models.get("net", trusted=True, workers=1)._prepare
    assert again.transform({"x": 3.0}) == {"x": 6.0}
    assert again.eval_transform({"x": 3.0}) == {"x": 3.0}
    om.close()
