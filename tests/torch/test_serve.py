"""PyTorch models behind the server's one face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kindler import Omega
from kindler.models.loaded import load, wrap
from kindler.models.signature import fit

X = np.random.default_rng(0).random((5, 4), np.float32)


class Two(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + right, "product": left * right}


def test_a_stored_module_gives_what_it_gives_in_evaluation(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3))
    om = Omega(tmp_path / "store")

    served = load(om.store, om.models.put(model, "net"), trusted=False).predictor

    assert [(s.name, s.dtype, s.shape) for s in served.signature.inputs] == [("input", "float32", (None, 4))]
    (outputs,) = served.call({"input": X}, "predict").values()
    np.testing.assert_allclose(outputs, model.eval()(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


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
