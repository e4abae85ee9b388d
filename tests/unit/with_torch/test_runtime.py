"""Stored PyTorch models on the runtime, as a worker runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator, Store, sandbox
from kindler.errors import UntrustedError
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.messages import Task
from kindler.runtime.sandboxed_model import Encoded, SandboxedModel

X = np.random.default_rng(0).random((6, 3))


def run(executor: Executor, name: str, verb: str, *args: Any, **options: Any) -> Any:
    task = Task(
        id="t",
        shelf="models",
        bucket="default",
        name=name,
        verb=verb,
        buffers=value_codec.encode([list(args), options]),
        trusted=True,
    )
    return executor.run(task)


def test_models_predict_what_they_do_here_whatever_the_numbers_are_sent_as(tmp_path: Path) -> None:
    om, executor = Store(tmp_path / "store"), Executor(str(tmp_path / "store"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    model.eval()
    expected = model(torch.from_numpy(X).float()).detach().numpy()
    om.models.put(model, "layers")
    om.models.put(model, "exported", example=(torch.zeros(6, 3),), trusted=True)
    om.models.put(Estimator.from_torch(model=model), "estimator")

    for name in ("layers", "exported", "estimator"):
        for data in (X, X.astype(np.float32), X.tolist()):
            given = np.asarray(data, np.float32) if name == "estimator" else data
            np.testing.assert_allclose(run(executor, name, "predict", given), expected, rtol=1e-5, atol=1e-6)
    om.close()


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_an_estimator_of_a_stranger_is_sandboxed_as_its_model_would_be(tmp_path: Path) -> None:
    om, executor = Store(tmp_path / "store"), Executor(str(tmp_path / "store"), trusted=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    version = om.models.put(Estimator.from_torch(model=model), "estimator")
    x = X.astype(np.float32)
    found = run(executor, "estimator", "predict", x)
    assert isinstance(found, Encoded)
    expected = model(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(value_codec.decode(found), expected, rtol=1e-5)
    (locked,) = executor._resident.values()
    assert isinstance(locked, SandboxedModel)
    try:
        with pytest.raises(UntrustedError, match="evaluating it starts processes"):
            locked.call("score", x, x[:, :2])
    finally:
        locked.close()
    # What is inside decides, wherever there is no sandbox, too.
    with pytest.raises(UntrustedError, match="of kind 'keras', was rejected"):
        MODEL_KINDS.sandboxed("it", "estimator", {**version.meta, "model_kind": "keras"}, "no Landlock")
    assert not MODEL_KINDS.sandboxed("it", "estimator", version.meta, "no Landlock")
    om.close()


def test_fit_trains_with_the_names_of_pytorchs_classes(tmp_path: Path) -> None:
    om, executor = Store(tmp_path / "store"), Executor(str(tmp_path / "store"))
    om.models.put(torch.nn.Sequential(torch.nn.Linear(3, 1)), "line")
    x = X.astype(np.float32)
    y = (x @ np.array([[1.0], [2.0], [3.0]], np.float32)).astype(np.float32)

    version = run(
        executor, "line", "fit", x, y, optimizer="SGD", lr=0.1, loss="MSELoss", epochs=3, batch_size=6
    )

    assert str(version) == "line@2"
    losses = [row["loss"] for row in version.attributes["history"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert not torch.equal(om.models.get("line")[0].weight, om.models.get("line@1")[0].weight)
    om.close()
