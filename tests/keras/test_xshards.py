"""XShards of the local engine and Keras models: inputs by name, several targets, rows dealt out unevenly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import problems
import pytest
from flavour import one_is_enough

from kindler import Estimator, XShards

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left"), one_is_enough]


def two_headed(config: Mapping[str, Any]) -> Any:
    """Two named inputs and two outputs, linear, so that a step can be worked out."""
    keras = problems.library(config)
    left, right = keras.Input((2,), name="left"), keras.Input((3,), name="right")
    both = keras.layers.Concatenate()([left, right])
    outputs = [keras.layers.Dense(1, name=name, kernel_initializer="ones")(both) for name in ("sum", "mean")]
    model = keras.Model([left, right], outputs)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=["mse", "mse"])
    return model


def test_uneven_and_empty_shards_give_the_weights_and_figures_of_one_process(
    keras: Any, flavour: str
) -> None:
    config = {"flavour": flavour, "optimizer": "sgd"}
    data = problems.problem(50)
    ends = (0, 7, 7, 40, 50)
    shards = XShards.from_shards(
        [{"x": data["x"][a:b], "y": data["y"][a:b]} for a, b in zip((0, *ends), ends, strict=False)],
        engine="local",
    )
    est = Estimator.from_keras(model=problems.classifier, config=config, workers=2)

    history = est.fit(shards, epochs=3, batch_size=50, validation_data=shards, verbose=0)
    figures = est.evaluate(shards, batch_size=16, verbose=0)
    scored = est.predict(shards, batch_size=16, verbose=0)

    alone = problems.seeded(problems.classifier, config)
    alone.fit(data["x"], data["y"], epochs=3, batch_size=50, shuffle=False, verbose=0)
    assert history["num_samples"] == history["val_num_samples"] == [50] * 3
    assert problems.largest_difference(est.get_model().get_weights(), alone.get_weights()) < 1e-5
    judged = alone.evaluate(data["x"], data["y"], batch_size=16, verbose=0, return_dict=True)
    assert {name: figures[name] for name in judged} == pytest.approx(judged, abs=1e-5)
    found = scored.collect()
    assert [len(shard["prediction"]) for shard in found] == [0, 7, 0, 33, 10]
    expected = alone.predict(data["x"], verbose=0)
    np.testing.assert_allclose(np.concatenate([s["prediction"] for s in found]), expected, atol=1e-5)


def test_dicts_of_inputs_reach_the_model_by_name_and_several_targets_in_order(flavour: str) -> None:
    random = np.random.default_rng(0)
    left, right = random.random((20, 2), np.float32), random.random((20, 3), np.float32)
    total = np.concatenate([left, right], axis=1).sum(1)
    shards = XShards.partition(
        {"x": {"right": right, "left": left}, "y": {"sum": total, "mean": total}}, 3, engine="local"
    )
    est = Estimator.from_keras(model=two_headed, config={"flavour": flavour}, workers=2)

    loss = est.fit(shards, epochs=1, batch_size=20, verbose=0)["loss"]
    scored = est.predict(shards, output_cols=["s", "m"], verbose=0).collect()

    assert loss == pytest.approx([0.0], abs=1e-9)  # the weights are ones: both outputs are the sum already
    assert [list(shard) for shard in scored] == [["x", "y", "s", "m"]] * 3
    np.testing.assert_allclose(np.concatenate([s["s"] for s in scored])[:, 0], total, rtol=1e-5)
