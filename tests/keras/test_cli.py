"""`kindler models put` and `predict` with a `.keras` file and a SavedModel."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flavour import KERAS, tensorflow_only

from kindler import cli

pytestmark = [pytest.mark.keras, tensorflow_only]


def test_a_keras_file_and_a_saved_model_are_stored_and_predict_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINDLER_STORE", str(tmp_path / "store"))
    model = KERAS.Sequential([KERAS.Input((3,)), KERAS.layers.Dense(2, activation="tanh")])
    model.save("net.keras")
    model.export("exported", verbose=False)
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    np.save("rows.npy", rows)
    expected = model.predict(rows, verbose=0)

    for source in ("net.keras", "exported"):
        assert cli.main(["models", "put", source, "net"]) == 0
        capsys.readouterr()
        assert cli.main(["predict", "net", "--input", "rows.npy"]) == 0
        found = json.loads(capsys.readouterr().out)["predictions"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert cli.main(["models", "get", "net@1", "again.keras"]) == 0
    assert Path("again.keras").read_bytes() == Path("net.keras").read_bytes()
    assert cli.main(["models", "get", "net@2", "again"]) == 0
    assert Path("again/saved_model.pb").read_bytes() == Path("exported/saved_model.pb").read_bytes()
