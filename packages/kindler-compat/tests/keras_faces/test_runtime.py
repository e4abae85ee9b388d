"""Training of a stored Keras model on the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flavour
import numpy as np

import kindler.compat.omegaml as omegaml
from tests.warm import end_warm_processes

pytestmark = flavour.one_is_enough
WAIT_S = 240


def test_fit_publishes_a_trained_version_with_its_history(tmp_path: Path, keras: Any) -> None:
    om = omegaml.Omega(tmp_path / "store", broker="local://?workers=1")
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    om.models.put(model, "small")
    x, y = np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 2

    version = om.runtime.model("small").fit(x, y, epochs=2, batch_size=10).get(WAIT_S)

    assert (version.name, version.number) == ("small", 2)
    assert [row["epoch"] for row in version.attributes["history"]] == [1, 2]
    before, after = om.models.get("small", version=-2), om.models.get("small", version=-1)
    assert not np.array_equal(before.get_weights()[0], after.get_weights()[0])
    found = om.runtime.model("small").predict(x).get(WAIT_S)
    np.testing.assert_allclose(found, after.predict(x, verbose=0), rtol=1e-5)
    om.close()
    end_warm_processes()
