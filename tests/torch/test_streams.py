"""Data that the user's own code makes: creators, DataLoaders and iterables, dealt out to several workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from kindler import Epochs
from kindler.errors import ConfigError, DataError, WorkerError
from tests import exact

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": ["id", "x"], "label_cols": "y"}


class Rows(Dataset):
    """(id, x, y) by index; some indices may be broken."""

    def __init__(self, rows: int, broken: int = -1) -> None:
        self.data, self.broken = exact.problem(rows), broken

    def __len__(self) -> int:
        return len(self.data["id"])

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        if i == self.broken:
            raise LookupError(f"row {i} is broken")
        return tuple(self.data[name][i] for name in ("id", "x", "y"))


class Streamed(IterableDataset):
    """The same, one after the other; worker processes of a loader share them."""

    def __init__(self, rows: int) -> None:
        self.rows = Rows(rows)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[i] for i in range(first, len(self.rows), every))


class Backwards(Sampler):
    """From the end, but for a few that Python's own randomness moves while the order is read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.rows))
        while left:
            yield left.pop(-1 - random.randrange(min(3, len(left))))

    def __len__(self) -> int:
        return self.rows


def stacked(samples: list[Any]) -> tuple[torch.Tensor, ...]:
    ids, xs, ys = zip(*samples, strict=True)
    return torch.tensor(ids), torch.from_numpy(np.stack(xs)), torch.tensor(ys)


def loader_creator(config: dict[str, Any], batch_size: int) -> DataLoader:
    assert batch_size == config["share"]
    return DataLoader(Rows(1000), batch_size=batch_size, shuffle=True)


def test_a_creator_of_a_thousand_samples_gives_each_of_them_once_per_epoch(tmp_path: Path) -> None:
    est = exact.estimator(workers=2, config={"share": 64})
    data, held_out = exact.problem(1000), exact.problem(31)

    history = est.fit(
        loader_creator,
        epochs=2,
        batch_size=128,
        validation_data=held_out,
        callbacks=[exact.Note(tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    assert history["steps"] == [8, 8]
    assert history["num_samples"] == [1000, 1000]
    assert history["val_num_samples"] == [31, 31]
    exact.assert_each_row_once_per_epoch(tmp_path, 1000, 2)
    steps = list(exact.steps(tmp_path).values())
    assert [len(ids) for ids in steps] == [*[128] * 7, 104] * 2
    assert steps[0] != steps[8], "each epoch has an order of its own"
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))

    est.fit(loader_creator, batch_size=128, validation_data=loader_creator, verbose=0)
    figures = est.evaluate(loader_creator, batch_size=128, verbose=0)
    expected = exact.single_process_figures(est.get_model(), data)
    assert figures == pytest.approx(expected, abs=1e-5)
    assert est.history[-1]["val_loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_a_loader_gives_the_very_batches_of_the_plain_program(tmp_path: Path) -> None:
    def loader() -> DataLoader:
        return DataLoader(Rows(101), 20, shuffle=True, generator=torch.Generator().manual_seed(5))

    est, plain = exact.estimator(workers=2), loader()

    history = est.fit(
        loader(), epochs=2, validation_data=loader(), callbacks=[exact.Note(tmp_path)], verbose=0
    )

    expected = [sorted(ids.tolist()) for _ in range(2) for ids, _, _ in plain]
    assert [len(ids) for ids in expected] == [20, 20, 20, 20, 20, 1] * 2
    assert [sorted(ids) for ids in exact.steps(tmp_path).values()] == expected
    assert history["val_num_samples"] == [101, 101]
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, exact.problem(101)))


def test_a_loaders_sampler_collate_function_workers_and_drop_last_are_kept(tmp_path: Path) -> None:
    loader = DataLoader(
        Rows(97),
        20,
        sampler=Backwards(97),
        collate_fn=stacked,
        num_workers=2,
        drop_last=True,
        persistent_workers=True,
    )

    history = exact.estimator(workers=2).fit(loader, epochs=2, callbacks=[exact.Note(tmp_path)], verbose=0)

    assert history["num_samples"] == [80, 80]
    first = list(exact.steps(tmp_path).values())[:4]
    assert len({i for ids in first for i in ids}) == 80, "no row was lost or doubled"
    assert min(first[0]) > 70, "the order is the sampler's"


def iterable_creator(config: dict[str, Any], batch_size: int) -> DataLoader:
    return DataLoader(Streamed(103), batch_size=batch_size, num_workers=2)


def generator_creator(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
    data, order = exact.problem(103), np.random.permutation(103)
    for start in range(0, 103, batch_size):
        ids = order[start : start + batch_size]
        yield (data["id"][ids], data["x"][ids].astype(np.float64)), data["y"][ids]


def only_the_first_has_any(config: dict[str, Any], batch_size: int, rank: int, workers: int) -> Any:
    class Mine(list):
        sharded = True

    assert workers == 2
    return Mine(generator_creator(config, batch_size)) if rank == 0 else Mine()


def with_a_distributed_sampler(config: dict[str, Any], batch_size: int, rank: int, workers: int) -> Any:
    rows = Rows(104)
    rows.data = {name: values[:103] for name, values in rows.data.items()}
    sampler = DistributedSampler(rows, workers, rank, drop_last=False)
    return DataLoader(rows, batch_size, sampler=sampler)


@pytest.mark.parametrize("creator", [iterable_creator, generator_creator, only_the_first_has_any])
def test_every_kind_of_stream_gives_each_row_once_per_epoch(tmp_path: Path, creator: Any) -> None:
    est = exact.estimator(workers=2)

    history = est.fit(creator, epochs=2, batch_size=20, callbacks=[exact.Note(tmp_path)], verbose=0)

    assert history["num_samples"] == [103, 103]
    exact.assert_each_row_once_per_epoch(tmp_path, 103, 2)
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, exact.problem(103)))
    assert est.evaluate(creator, verbose=0)["num_samples"] == 103


def test_a_distributed_sampler_is_left_alone() -> None:
    history = exact.estimator(workers=2).fit(with_a_distributed_sampler, batch_size=20, verbose=0)

    assert history["num_samples"] == [104], "it repeats a row, to give all workers as many"


def test_a_stream_without_end_has_epochs_of_as_many_steps_as_asked_for(tmp_path: Path) -> None:
    def endless(config: dict[str, Any], batch_size: int) -> Any:
        return itertools.cycle(list(generator_creator(config, batch_size)))

    est = exact.estimator(workers=2)
    history = est.fit(
        endless,
        epochs=Epochs(2, steps_per_epoch=7),
        batch_size=20,
        callbacks=[exact.Note(tmp_path)],
        verbose=0,
    )

    assert history["steps"] == [7, 7]
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, exact.problem(103)))
    with pytest.raises(ConfigError, match="no end.*\n.*steps_per_epoch"):
        est.fit(endless, batch_size=20, verbose=0)


def test_epochs_of_their_own_length_go_on_through_passes(tmp_path: Path) -> None:
    est = exact.estimator(workers=2)

    history = est.fit(
        DataLoader(Rows(30), 10),
        epochs=Epochs(2, steps_per_epoch=4),
        callbacks=[exact.Note(tmp_path)],
        verbose=0,
    )

    assert history["num_samples"] == [40, 40]
    assert [min(ids) for ids in exact.steps(tmp_path).values()] == [0, 10, 20, 0, 10, 20, 0, 10]


def test_what_a_dataset_raises_is_raised_with_its_rank() -> None:
    def creator(config: dict[str, Any], batch_size: int) -> DataLoader:
        return DataLoader(Rows(40, broken=33), batch_size=batch_size, num_workers=2)

    with pytest.raises(LookupError, match="row 33 is broken") as caught:
        exact.estimator(workers=2).fit(creator, batch_size=10, verbose=0)

    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        ((np.zeros(3), np.zeros(3)), ConfigError, "it returned an object of type tuple.\nHint: arrays"),
        ([], DataError, "no rows"),
    ],
)
def test_creators_of_something_else_are_refused_in_words(made: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        exact.estimator(workers=1).fit(lambda config: made, verbose=0)


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    est = exact.estimator(workers=2)

    with pytest.raises(ConfigError, match="feature_cols is for data that has columns"):
        est.fit(loader_creator, feature_cols="x")
    with pytest.raises(ConfigError, match="predict does not take functions or data loaders"):
        est.predict(loader_creator)
    with pytest.raises(ConfigError, match=r"needs 3 arguments.*called with\s+\(config, batch_size\)"):
        est.fit(lambda config, batch_size, other: None)
    with pytest.raises(ConfigError, match="cannot be sent.*\nHint: pass a function"):
        est.fit(DataLoader([open], collate_fn=(i for i in ())))  # type: ignore[arg-type]
