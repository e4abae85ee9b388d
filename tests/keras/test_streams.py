"""Batches that the user's own code makes for a Keras model: creators, tf.data, PyDatasets, generators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole

from kindler import Epochs, Estimator
from kindler.errors import ConfigError, WorkerError
from kindler.frameworks.loaders import LoaderSharding, open_stream

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

on_tensorflow = pytest.mark.skipif(FLAVOUR not in ("tensorflow", "tf_keras"), reason="needs TensorFlow")
CONFIG = {"flavour": FLAVOUR, "optimizer": "sgd"}


def two_workers(config: dict[str, Any] | None = None, **options: Any) -> Estimator:
    return Estimator.from_keras(
        model=problems.classifier,
        config=CONFIG | (config or {}),
        workers=2,
        engine="local",
        **options,
    )


def cut(rows: int, batch_size: int) -> Iterator[tuple[Any, ...]]:
    data = problems.problem(rows)
    for start in range(0, rows, batch_size):
        part = slice(start, start + batch_size)
        yield data["x"][part], data["y"][part], data["w"][part]


def dataset_creator(config: dict[str, Any], batch_size: int) -> Any:
    """As each backend's users would write it; the third part is a weight per row."""
    data = problems.problem(1000)
    if FLAVOUR in ("tensorflow", "tf_keras"):
        import tensorflow as tf

        arrays = (data["x"], data["y"], data["w"])
        return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size).prefetch(2)
    if FLAVOUR == "torch":
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        rows = TensorDataset(*(torch.from_numpy(data[name]) for name in "xyw"))
        # Its own sampler deals rows, not batches, so that a step has the rows of one process's.
        return DataLoader(rows, batch_size=batch_size)

    class Given(KERAS.utils.PyDataset):
        def __len__(self) -> int:
            return math.ceil(1000 / batch_size)

        def __getitem__(self, number: int) -> Any:
            return next(itertools.islice(cut(1000, batch_size), number, None))

    return Given()


@one_unless_whole
def test_a_creator_of_a_thousand_samples_trains_as_one_process_does(keras: Any, tmp_path: Path) -> None:
    est = two_workers({"weighted": True})
    held_out = problems.problem(50)

    history = est.fit(
        dataset_creator,
        epochs=2,
        batch_size=128,
        validation_data=(held_out["x"], held_out["y"]),
        callbacks=[problems.note_weights(keras, tmp_path)],
        verbose=0,
    )

    alone = problems.seeded(problems.classifier, CONFIG | {"weighted": True})
    told = problems.fit_alone(keras, alone, [[((x,), (y, w)) for x, y, w in cut(1000, 128)]] * 2)
    first, second = problems.noted_weights(tmp_path)
    assert history["steps"] == [8, 8]
    assert history["num_samples"] == [1000, 1000]
    assert history["val_num_samples"] == [50, 50]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert problems.largest_difference(first, alone.get_weights()) < 1e-4
    assert history["loss"] == pytest.approx(told["loss"], abs=1e-4)
    judged = alone.evaluate(held_out["x"], held_out["y"], verbose=0, return_dict=True)
    assert history["val_loss"][-1] == pytest.approx(judged["loss"], abs=1e-4)
    assert est.evaluate(dataset_creator, batch_size=128, verbose=0)["num_samples"] == 1000


def generator_creator(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
    return ((x, y) for x, y, _ in cut(40, batch_size))


@one_unless_whole
def test_workers_of_uneven_generators_take_the_steps_of_one_process(keras: Any) -> None:
    est = two_workers()

    history = est.fit(
        generator_creator, epochs=2, batch_size=16, validation_data=generator_creator, verbose=0
    )

    alone = problems.seeded(problems.classifier, CONFIG)
    told = problems.fit_alone(keras, alone, [[((x,), (y,)) for x, y, _ in cut(40, 16)]] * 2)
    assert history["steps"] == [3, 3], (
        "five batches of eight rows: the second worker has none in the last step"
    )
    assert history["num_samples"] == history["val_num_samples"] == [40, 40]
    assert problems.largest_difference(est.get_model().get_weights(), alone.get_weights()) < 1e-5
    assert history["loss"] == pytest.approx(told["loss"], abs=1e-5)


@one_is_enough
def test_a_stream_without_end_has_epochs_of_as_many_steps_as_asked_for() -> None:
    def endless(config: dict[str, Any], batch_size: int) -> Any:
        return itertools.cycle(list(generator_creator(config, batch_size)))

    est = two_workers()

    assert est.fit(endless, epochs=Epochs(2, steps_per_epoch=5), batch_size=16, verbose=0)["steps"] == [5, 5]
    with pytest.raises(ConfigError, match="no end.*\n.*steps_per_epoch"):
        est.fit(endless, batch_size=16, verbose=0)


@one_unless_whole
def test_what_a_creator_raises_on_its_way_is_raised_with_its_rank() -> None:
    def broken(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        for number, batch in enumerate(generator_creator(config, batch_size)):
            if number == 3:
                raise LookupError("batch 3 is broken")
            yield batch

    with pytest.raises(LookupError, match="batch 3 is broken") as caught:
        two_workers().fit(broken, batch_size=16, epochs=Epochs(steps_per_epoch=3), verbose=0)

    assert isinstance(caught.value, WorkerError)


@on_tensorflow
def test_a_dataset_of_the_drivers_is_cut_so_that_each_row_is_used_once() -> None:
    import tensorflow as tf

    data = problems.problem(97)
    dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).shuffle(97).batch(32)
    est = two_workers({"optimizer": "still"})

    history = est.fit(dataset, epochs=2, validation_data=dataset, verbose=0)

    # Nothing is learned at a rate of 0, so every epoch's loss is that of all rows.
    still = est.evaluate((data["x"], data["y"]), verbose=0)["loss"]
    assert history["steps"] == [4, 4]
    assert history["num_samples"] == history["val_num_samples"] == [97, 97]
    assert history["loss"] == pytest.approx([still, still], abs=1e-6)
    assert history["val_loss"] == pytest.approx([still, still], abs=1e-6)

    of_python = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec(()))
    with pytest.raises(ConfigError, match="calls Python code.*\nHint: pass a function"):
        est.fit(of_python)


@on_tensorflow
@pytest.mark.parametrize(("ranks", "files_each"), [(2, [{0}, {1}]), (3, [{0, 1}, {0, 1}, {0, 1}])])
def test_files_are_dealt_to_ranks_where_there_are_enough_and_batches_otherwise(
    tmp_path: Path, ranks: int, files_each: list[set[int]]
) -> None:
    import tensorflow as tf

    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("\n".join(str(file) for _ in range(12)))
    paths = [str(tmp_path / f"{file}.txt") for file in range(2)]

    def seen(rank: int) -> list[int]:
        dataset = tf.data.TextLineDataset(paths).batch(2)
        stream = open_stream(lambda: dataset, LoaderSharding(rank, ranks, 0), title="f()")
        return [int(line) for batch in stream.batches(1) for line in batch.numpy()]

    found = [seen(rank) for rank in range(ranks)]

    assert [set(lines) for lines in found] == files_each
    assert sorted(itertools.chain(*found)) == [0] * 12 + [1] * 12


@one_is_enough
def test_orcas_program_with_a_data_creator(keras: Any) -> None:
    import pandas as pd
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    df = pd.DataFrame({"image": list((images / 16).astype(np.float32))})
    total_size, batch_size, max_epoch = len(images), 64, 8

    def create_keras_lenet_model() -> Any:
        layers = keras.layers
        return keras.Sequential(
            [layers.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")]
        )

    def preprocess(image: Any, label: Any) -> Any:
        return tf.cast(image, tf.float32) / 16, label

    def model_creator(config: dict[str, Any]) -> Any:
        model = create_keras_lenet_model()
        model.compile(
            optimizer=keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        return model

    est = Estimator.from_keras(model=model_creator, workers=2)

    def train_data_creator(config: dict[str, Any], batch_size: int) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        dataset = dataset.map(preprocess)
        return dataset.batch(batch_size)

    stats = est.fit(
        data=train_data_creator, epochs=Epochs(max_epoch, steps_per_epoch=total_size // batch_size), verbose=0
    )
    predictions = est.predict(data=df, feature_cols=["image"])

    assert stats["steps"] == [total_size // batch_size] * max_epoch
    assert np.mean([np.argmax(p) for p in predictions["prediction"]] == labels) > 0.85
