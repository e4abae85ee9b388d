"""Rows that are decoded, augmented and padded in the workers: the same whoever does it, and after a death."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from interrupted import (
    KEPT,
    Falls,
    assert_same,
    attempts,
    figures,
    fit,
    notes,
    shaky,
    times_trained,
    weights,
)
from torch import nn

from kindler import Estimator, Prepare, batched
from kindler.callbacks import Callback
from kindler.data import images
from kindler.errors import ConfigError, DataError, UntrustedError
from tests import exact
from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS, EPOCHS = 97, 2
RANDOM = np.random.default_rng(3)
DATA = exact.problem(ROWS)
LENGTHS = RANDOM.integers(1, 12, ROWS)
TOKENS = {
    "id": np.arange(ROWS),
    "tokens": [RANDOM.integers(1, 20, n).tolist() for n in LENGTHS],
    "y": (LENGTHS > 6).astype(np.int64),
}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": row["id"], "x": row["x"] + rng.normal(scale=0.5, size=row["x"].shape)}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return row


class Seen(nn.Module):
    """A classifier that keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Linear(exact.WIDTH, exact.CLASSES)
        self.seen: dict[int, list[float]] = {}

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen |= dict(zip(ids.tolist(), x.tolist(), strict=True))
        return self.layers(x)


class Filed(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_epoch_end(self, run: Any, row: Any) -> None:
        Path(self.folder, f"{run.epoch}-{run.rank}.json").write_text(json.dumps(run.model.seen))
        run.model.seen = {}


def seen(folder: Path, epoch: int) -> dict[int, list[float]]:
    parts = [json.loads(file.read_text()) for file in folder.glob(f"{epoch}-*.json")]
    return {int(row): x for part in parts for row, x in part.items()}


@batched
def noisy_rows(columns: dict[str, Any], rngs: Any) -> dict[str, Any]:
    noise = [rng.normal(scale=0.5, size=exact.WIDTH) for rng in rngs]
    return {"id": columns["id"], "x": columns["x"] + noise}


def test_each_row_is_augmented_alike_by_one_worker_and_two_and_anew_in_each_epoch(tmp_path: Path) -> None:
    trained = []
    for workers, transform in ((1, noisy), (2, noisy_rows)):
        folder = tmp_path / str(workers)
        folder.mkdir()
        model = Seen()
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            workers=workers,
            prepare=Prepare(transform=transform, eval_transform=plain),
        )
        est.fit(DATA, EPOCHS, 20, callbacks=[Filed(folder)], verbose=0, **exact.COLUMNS)
        trained.append(est)

    first, second = seen(tmp_path / "1", 1), seen(tmp_path / "1", 2)
    assert first == seen(tmp_path / "2", 1)
    assert second == seen(tmp_path / "2", 2)
    assert sorted(first) == list(range(ROWS))
    assert all(first[row] != second[row] for row in first)
    exact.assert_close(exact.weights(trained[1]), exact.weights(trained[0]))
    judged = trained[1].evaluate(DATA, verbose=0)
    with torch.no_grad():
        logits = trained[1].get_model().layers(torch.from_numpy(DATA["x"]))
    expected = nn.functional.cross_entropy(logits, torch.from_numpy(DATA["y"])).item()
    assert judged["loss"] == pytest.approx(expected, abs=1e-5), "without noise"


AUGMENTED = Prepare(transform=noisy, eval_transform=plain)


@pytest.fixture(scope="module")
def whole() -> tuple[Any, dict[str, np.ndarray]]:
    """Figures and weights of the run that nobody interrupts."""
    est = shaky(prepare=AUGMENTED)
    return figures(fit(est)), weights(est)


@whole_only
@pytest.mark.parametrize("rank", [1, None])
def test_a_run_that_lost_a_worker_ends_as_the_one_that_was_not_interrupted(
    tmp_path: Path, whole: Any, rank: int | None
) -> None:
    folder = tmp_path / "run"
    again = shaky(prepare=AUGMENTED)

    history = fit(again, Falls(tmp_path, "die", checkpoints=folder, rank=rank), folder=folder)

    assert attempts(tmp_path) == [2] * (1 if rank == 1 else 2), "one is replaced; without any, all restart"
    assert figures(history) == whole[0]
    assert_same(again, whole[1])


def test_a_run_that_is_resumed_by_hand_in_mid_epoch_augments_rows_as_it_would_have(
    tmp_path: Path, whole: Any
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="boom"):
        fit(shaky(prepare=AUGMENTED), Falls(tmp_path, "fail", checkpoints=folder), folder=folder)
    noted = notes(tmp_path / "notes")
    again = shaky(prepare=AUGMENTED)

    history = fit(again, noted, folder=folder, resume=True)

    assert min(times_trained(tmp_path / "notes")) == KEPT + 1, "in the middle of the second epoch"
    assert figures(history) == whole[0]
    assert_same(again, whole[1])


class Reader(nn.Module):
    """Its outputs depend on the width that rows are padded to, so that nobody may pad otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.out((self.words(tokens) * (mask[:, :, None] + 0.5)).mean(1))


def padded(ids: list[int]) -> tuple[torch.Tensor, ...]:
    rows = [TOKENS["tokens"][i] for i in ids]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return torch.tensor(ids), tokens, mask


@pytest.mark.parametrize("length_col", [None, "tokens"])
def test_batches_of_two_workers_are_padded_as_by_hand_and_hold_every_row_once(
    tmp_path: Path, length_col: str | None
) -> None:
    model = Reader()
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        workers=2,
        prepare=Prepare(pad="batch", length_col=length_col),
    )
    est.fit(
        TOKENS,
        EPOCHS,
        16,
        feature_cols=["id", "tokens"],
        label_cols="y",
        callbacks=[exact.Note(tmp_path)],
        verbose=0,
    )

    exact.assert_each_row_once_per_epoch(tmp_path, ROWS, EPOCHS)
    steps = exact.steps(tmp_path)
    by_hand = Reader()
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=1e-2)
    y = torch.from_numpy(TOKENS["y"])
    for ids in steps.values():
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(*padded(ids)), y[ids]).backward()
        optimizer.step()
    exact.assert_same_weights(est.get_model(), by_hand)
    spread = np.mean([np.ptp(LENGTHS[ids]) for ids in steps.values()])
    assert spread < 4 if length_col else spread > 8

    if length_col is None:
        return
    judged = est.evaluate(TOKENS, batch_size=ROWS, verbose=0)
    scored = est.predict({"id": TOKENS["id"], "tokens": TOKENS["tokens"]}, batch_size=ROWS, verbose=0)[
        "prediction"
    ]
    with torch.no_grad():
        logits = est.get_model().eval()(*padded(list(range(ROWS))))
    assert judged["loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), abs=1e-5)
    np.testing.assert_allclose(scored, logits.numpy(), atol=1e-5)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(20, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens).transpose(1, 2)


def test_losses_over_padded_labels_weigh_tokens_whoever_has_them() -> None:
    data = {"tokens": TOKENS["tokens"], "tags": [[t % 3 for t in row] for row in TOKENS["tokens"]]}
    trained = []
    for workers in (1, 2):
        model = Tagger()
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loss=nn.CrossEntropyLoss(),
            workers=workers,
            prepare=Prepare(pad="batch", masks=False, length_col="tokens"),
        )
        history = est.fit(data, 2, 16, feature_cols="tokens", label_cols="tags", verbose=0)
        trained.append((exact.weights(est), history["loss"]))

    exact.assert_close(trained[1][0], trained[0][0])
    assert trained[1][1] == pytest.approx(trained[0][1], abs=1e-5)


def png(pixels: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pictures(rows: int) -> tuple[pa.Table, np.ndarray]:
    pixels = RANDOM.integers(0, 256, (rows, 6, 6, 3), dtype=np.uint8)
    pixels[::2] //= 3
    labels = np.arange(rows) % 2
    return pa.table({"png": [png(p) for p in pixels], "label": labels}), pixels


def classifier(**options: Any) -> Estimator:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 3, 2))
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=nn.CrossEntropyLoss(),
        metrics="accuracy",
        prepare=Prepare(
            transform=images.from_bytes("png", to="image", crop=4, flip=True, std=0.5, channels="first")
        ),
        **{"workers": 2, **options},
    )


def test_images_are_decoded_wherever_rows_are_trained_on_judged_and_scored(tmp_path: Path) -> None:
    table, pixels = pictures(60)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=13)
    columns = {"feature_cols": "png", "label_cols": "label"}
    est = classifier()

    history = est.fit(str(tmp_path / "rows.parquet"), 8, 12, validation_data=table, verbose=0, **columns)

    assert history["val_accuracy"][-1] > 0.9
    inputs = (pixels[:, 1:5, 1:5].astype(np.float32) / 255 / 0.5).transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = est.get_model().eval()(torch.from_numpy(np.ascontiguousarray(inputs))).numpy()

    def scored(by: Estimator) -> np.ndarray:
        return np.stack(
            by.predict(table, batch_size=7, verbose=0).column("prediction").to_numpy(zero_copy_only=False)
        )

    np.testing.assert_allclose(scored(est), expected, atol=1e-5)
    written = est.predict(str(tmp_path / "rows.parquet"), output_path=tmp_path / "scored", verbose=0)
    from_files = pq.read_table(written).column("prediction").to_pylist()
    np.testing.assert_allclose(from_files, expected, atol=1e-5)

    est.save(tmp_path / "whole.estimator")
    with pytest.raises(UntrustedError, match="trusted=True"):
        Estimator.load(tmp_path / "whole.estimator")
    for again in (Estimator.load(tmp_path / "whole.estimator", trusted=True), est.copy()):
        np.testing.assert_allclose(scored(again), expected, atol=1e-5)


def test_a_damaged_image_ends_the_run_with_its_row_and_worker() -> None:
    table, _ = pictures(30)
    broken = table.column("png").to_pylist()
    broken[17] = broken[17][:40]
    data = table.set_column(0, "png", pa.array(broken))
    columns = {"feature_cols": "png", "label_cols": "label"}

    with pytest.raises(
        DataError, match=r"column 'png', row 17: cannot be read.*in transform, worker [01]"
    ) as found:
        classifier().fit(data, 1, 8, verbose=0, **columns)

    assert (found.value.column, found.value.row) == ("png", 17)
    with pytest.raises(DataError, match="column 'png', row 17: cannot be read"):
        classifier().predict(data.drop_columns("label"), feature_cols="png", batch_size=8, verbose=0)


def test_what_cannot_work_is_refused_before_workers_start() -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))
    )
    est = exact.estimator(prepare=Prepare(transform=noisy, length_col="x"))

    with pytest.raises(ConfigError, match="transform and length_col: your own code creates the batches"):
        est.fit(loader)
    with pytest.raises(ConfigError, match="length_col orders rows by length, and shuffle=False"):
        est.fit(DATA, shuffle=False, **exact.COLUMNS)
    with pytest.raises(ConfigError, match="length_col: there is no column 'z'"):
        exact.estimator(prepare=Prepare(length_col="z")).fit(DATA, **exact.COLUMNS)
    with pytest.raises(ConfigError, match="(?s)transform must be a function.*pad must be 'batch'"):
        exact.estimator(prepare=Prepare(transform=3, pad=-1))
    with (
        pytest.warns(UserWarning, match="there is no eval_transform"),
        pytest.raises(ConfigError, match="which columns"),
    ):
        exact.estimator(prepare=Prepare(transform=noisy)).evaluate({"a": [1]})
