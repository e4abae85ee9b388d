"""The front door on the local engine: every kind of data, saving and loading, and what comes back."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, Optimization
from kindler.callbacks import Callback
from kindler.errors import ConfigError, NotFittedError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(101, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
WHOLE = {"batch_size": len(X), "verbose": 0}  # one batch: the order of rows plays no part


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def estimator(**options: Any) -> Estimator:
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Estimator.from_torch(
        **{"model": model, "optimizer": sgd, "loss": nn.MSELoss(), "workers": 2, **options}
    )


def weights(est: Estimator) -> list[float]:
    return [float(v) for p in est.get_model().parameters() for v in p.detach().ravel()]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """A plain loop: three steps on all rows."""
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.mse_loss(model(torch.from_numpy(X))[:, 0], torch.from_numpy(Y)).backward()
        sgd.step()
    return [float(v) for p in model.parameters() for v in p.detach().ravel()]


def as_tuple(folder: Path) -> Any:
    return (X, Y)


def as_dict(folder: Path) -> Any:
    return {"x": X, "y": Y}


def as_pandas(folder: Path) -> Any:
    return pd.DataFrame({"x": list(X), "y": Y})


def as_table(folder: Path) -> Any:
    return pa.table({"x": list(X), "y": Y})


def as_path(folder: Path) -> Any:
    pq.write_table(as_table(folder), folder / "one.parquet", row_group_size=7)
    return folder / "one.parquet"


def as_paths(folder: Path) -> Any:
    table = as_table(folder)
    for i, part in enumerate([table.slice(0, 5), table.slice(5, 90), table.slice(95)]):
        pq.write_table(part, folder / f"{i}.parquet")
    return [str(folder / f"{i}.parquet") for i in range(3)]


@pytest.mark.parametrize("form", [as_tuple, as_dict, as_pandas, as_table, as_path, as_paths])
def test_every_kind_of_data_trains_the_same_model(tmp_path: Path, form: Any, expected: list[float]) -> None:
    est = estimator()

    history = est.fit(form(tmp_path), epochs=3, **WHOLE)

    assert history["num_samples"] == [101] * 3
    assert weights(est) == pytest.approx(expected, abs=1e-5)


class Made:
    """A callable object that makes a model, and a bound method that makes an optimizer."""

    def __call__(self, config: dict[str, Any]) -> nn.Module:
        return linear()

    def optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


def loss_creator(config: dict[str, Any]) -> nn.Module:
    return nn.MSELoss()


def optimizer_creator(scale: float, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config["lr"] * scale, momentum=0.9)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": Made(), "optimizer": Made().optimizer, "loss": loss_creator},
        {"model": linear, "optimizer": functools.partial(optimizer_creator, 1.0), "loss": nn.MSELoss},
        {
            "model": lambda config: linear(),
            "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            "loss": nn.functional.mse_loss,
        },
    ],
)
def test_creators_partials_bound_methods_and_callables_make_the_same_model(
    parts: dict[str, Any], expected: list[float]
) -> None:
    est = estimator(**parts, config={"lr": 0.1})

    est.fit((X, Y[:, None]), epochs=3, **WHOLE)

    assert weights(est) == pytest.approx(expected, abs=1e-5)


def test_accumulation_changes_nothing_but_memory(expected: list[float]) -> None:
    est = estimator(optimization=Optimization(accumulation_steps=4))

    est.fit((X, Y), epochs=3, **WHOLE)

    assert weights(est) == pytest.approx(expected, abs=1e-5)


def test_a_scheduler_moves_per_epoch_or_per_step() -> None:
    class Rates(Callback):
        def __init__(self, path: Path) -> None:
            self.path = str(path)

        def on_step_end(self, run: Any) -> None:
            if run.rank == 0:
                with open(self.path, "a") as file:
                    file.write(f"{run.optimizer.param_groups[0]['lr']:.4f} ")

    def halve(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    import tempfile

    for when, rates in (("epoch", "0.1000 0.1000 0.0500 0.0500"), ("step", "0.0500 0.0250 0.0125 0.0063")):
        with tempfile.NamedTemporaryFile() as file:
            est = estimator(scheduler=halve, optimization=Optimization(scheduler_step=when))
            est.fit((X, Y), epochs=2, batch_size=51, callbacks=[Rates(Path(file.name))], verbose=0)
            assert Path(file.name).read_text().split() == rates.split()


class TwoHeads(nn.Module):
    """Several inputs by name, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(1, 1)

    def forward(self, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(columns["x"]), self.b(columns["z"][:, None].float())


def both(first: torch.Tensor, second: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(first, y) + nn.functional.mse_loss(second, w)  # labels have their shapes


def test_dict_inputs_and_several_outputs_train_and_predict() -> None:
    model = TwoHeads()
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=both,
        inputs="dict",
        workers=2,
    )
    data = {"x": X, "z": np.arange(101) % 3, "y": Y, "w": Y * 2}

    history = est.fit(
        data, epochs=20, batch_size=16, feature_cols=["x", "z"], label_cols=["y", "w"], verbose=0
    )
    scored = est.predict(data, output_cols=["first", "second"])

    assert history["loss"][-1] < history["loss"][0]
    with torch.no_grad():
        outputs = est.get_model()({"x": torch.from_numpy(X), "z": torch.from_numpy(data["z"])})
    np.testing.assert_allclose(scored["first"], outputs[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(scored["second"], outputs[1].numpy(), atol=1e-5)


def test_load_creates_and_is_not_there_to_load_into_an_estimator() -> None:
    with pytest.raises(AttributeError, match="load_weights loads into this one"):
        estimator().load("weights.pt")


def test_saved_weights_load_in_plain_torch_and_in_another_estimator(tmp_path: Path) -> None:
    est = estimator()
    est.fit((X, Y), epochs=1, **WHOLE)
    est.save(tmp_path / "weights.pt")

    plain = nn.Linear(3, 1)
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    other = estimator().load_weights(tmp_path / "weights.pt")

    with torch.no_grad():
        np.testing.assert_array_equal(plain(torch.from_numpy(X)).numpy(), est.predict(X))
    np.testing.assert_array_equal(other.predict(X), est.predict(X))


def test_training_from_a_checkpoint_equals_training_that_never_stopped(tmp_path: Path) -> None:
    whole, first, second = estimator(), estimator(), estimator()
    options = {"batch_size": 20, "verbose": 0}

    whole.fit((X, Y), epochs=4, **options)
    first.fit((X, Y), epochs=2, **options)
    first.save_checkpoint(tmp_path / "checkpoint.pt")
    history = second.load_checkpoint(tmp_path / "checkpoint.pt").fit((X, Y), epochs=2, **options)

    assert history["epoch"] == [3, 4]
    assert weights(second) == weights(whole)


def test_a_folder_gets_a_whole_checkpoint_per_epoch(tmp_path: Path) -> None:
    est = estimator()

    est.fit((X, Y), epochs=2, checkpoint=tmp_path / "run", **WHOLE)

    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoint-000001-epoch-00001-step-000000001.kindler",
        "checkpoint-000002-epoch-00002-step-000000002.kindler",
    ]
    newest = Estimator.latest_checkpoint(tmp_path / "run")
    assert newest == str(tmp_path / "run" / "checkpoint-000002-epoch-00002-step-000000002.kindler")
    again = estimator().load_checkpoint(newest)
    assert weights(again) == weights(est)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name in ("junk.pt", "junk.kindler"):
        (tmp_path / name).write_bytes(b"junk")

    for load in (Estimator.load_weights, Estimator.load_checkpoint):
        with pytest.raises(ConfigError, match="not a weights or state file"):
            load(estimator(), tmp_path / "junk.pt")
    with pytest.raises(ConfigError, match=r"junk\.kindler is not a complete checkpoint"):
        estimator().load_checkpoint(tmp_path / "junk.kindler")
    with pytest.raises(NotFittedError, match=r"call fit\(\) before"):
        estimator().save_checkpoint(tmp_path / "none.pt")


def test_shapes_and_dtypes_of_labels_are_not_asked_of_rows_that_are_scored() -> None:
    est = Estimator.from_torch(
        model=nn.Linear(4, 2), optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1, engine="local"
    )
    rows = {"x": np.ones((8, 4), "float32"), "goal": np.zeros((8, 2), "float32")}
    told = Columns(shapes={"goal": (2,)}, dtypes={"goal": "float32"})
    est.fit(rows, 1, 8, feature_cols="x", label_cols="goal", columns=told, verbose=0)

    assert est.predict(rows["x"]).shape == (8, 2)
    with pytest.raises(ConfigError, match="shapes: there is no column 'goal'"):
        est.predict(rows["x"], columns=Columns(shapes={"goal": (2,)}))


def test_a_column_of_the_training_that_is_missing_is_named_as_such() -> None:
    est = Estimator.from_torch(
        model=nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1, engine="local"
    )
    rows = {name: np.ones((8,), "float32") for name in ("height", "width", "y")}
    est.fit(
        rows,
        feature_cols=["height", "width"],
        columns=Columns(stack_features=True),
        label_cols="y",
        batch_size=8,
        verbose=0,
    )
    rows["hight"] = rows.pop("height")

    for use in (est.predict, est.evaluate):
        with pytest.raises(
            ConfigError, match=r"was trained on a column 'height', which is missing. Did you mean 'hight'"
        ):
            use(rows)
    with pytest.raises(ConfigError, match=r"^feature_cols: there is no column 'height'"):
        est.predict(rows, feature_cols=["height", "width"])


def test_a_model_that_takes_one_input_gets_no_several_columns() -> None:
    est = Estimator.from_torch(
        model=nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1, engine="local"
    )
    rows = {name: np.ones((8,), "float32") for name in ("height", "width", "y")}

    with pytest.raises(
        ConfigError, match=r"Linear.forward\(input\) is called with 2 inputs.*\n.*stack_features=True"
    ):
        est.fit(rows, feature_cols=["height", "width"], label_cols="y", batch_size=8, verbose=0)


def test_a_misspelt_argument_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="'label_col'. Did you mean 'label_cols'"):
        estimator().fit(X, label_col="y")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'stack_feature'. Did you mean 'stack_features'"):
        estimator().fit(X, stack_feature=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'optimiser'. Did you mean 'optimizer'"):
        Estimator.from_torch(model=nn.Linear(1, 1), optimiser=torch.optim.SGD)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown metric 'acuracy'. Did you mean 'accuracy'"):
        Estimator.from_torch(model=nn.Linear(1, 1), metrics=["acuracy"])


def test_predictions_come_back_in_the_kind_that_was_handed_in() -> None:
    est = Estimator.from_torch(model=nn.Identity())

    assert est.predict(X).tolist() == X.tolist()
    assert est.predict({"x": X, "name": np.arange(101)})["prediction"].tolist() == X.tolist()
    frame = est.predict(pd.DataFrame({"x": list(X), "kept": "a"}), feature_cols="x")
    assert np.stack(frame["prediction"].to_list()).tolist() == X.tolist()
    assert list(frame.columns) == ["x", "kept", "prediction"]
    table = est.predict(pa.table({"x": list(X), "kept": ["a"] * 101}), feature_cols="x", output_cols="out")
    assert table.column("out").to_pylist() == X.tolist()
    assert table.column_names == ["x", "kept", "out"]


class Minus(nn.Module):
    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return columns["user"] - columns["item"]


def test_inputs_by_name_keep_their_names_when_the_columns_come_in_another_order() -> None:
    est = Estimator.from_torch(model=Minus(), inputs="dict")
    data = {"user": np.arange(4, dtype=np.float32), "item": np.full(4, 10, np.float32)}

    for names in (["user", "item"], ["item", "user"], ["user", "item"]):
        assert est.predict(data, feature_cols=names)["prediction"].tolist() == [-10, -9, -8, -7]


def test_a_parquet_path_is_scored_into_files_in_the_same_order(tmp_path: Path) -> None:
    rows = pa.table(
        {"id": np.arange(1000), "x": list(np.arange(2000.0).reshape(1000, 2)), "word": ["w"] * 1000}
    )
    pq.write_table(rows, tmp_path / "in.parquet", row_group_size=130)
    est = Estimator.from_torch(model=nn.Identity(), workers=3)

    written = est.predict(
        tmp_path / "in.parquet", batch_size=64, feature_cols="x", output_path=tmp_path / "out", verbose=0
    )

    scored = pq.read_table(written)
    assert scored.column("id").to_pylist() == list(range(1000))
    assert scored.column("prediction").to_pylist() == scored.column("x").to_pylist()
    assert scored.column_names == ["id", "x", "word", "prediction"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet", "out"]
    with pytest.raises(ConfigError, match="exists already"):
        est.predict(tmp_path / "in.parquet", feature_cols="x", output_path=tmp_path / "out")


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.sum(1)


def test_a_parquet_path_is_scored_by_a_model_of_several_outputs(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(X)}), tmp_path / "in.parquet")
    est = Estimator.from_torch(model=Twice(), workers=1)

    written = est.predict(
        tmp_path / "in.parquet", output_cols=["same", "total"], output_path=tmp_path / "out", verbose=0
    )

    scored = pq.read_table(written)
    assert scored.column("same").to_pylist() == X.tolist()
    np.testing.assert_allclose(scored.column("total").to_numpy(), X.sum(1), rtol=1e-5)


def test_a_callback_can_end_the_run_on_all_workers() -> None:
    class Enough(Callback):
        def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
            if run.rank == 1 and run.epoch == 2:  # only one of them decides
                run.stop("enough")

    assert estimator().fit((X, Y), epochs=9, callbacks=[Enough()], **WHOLE)["epoch"] == [1, 2]


def test_progress_is_shown_unless_it_is_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    class Talk(Callback):
        def on_run_begin(self, run: Any) -> None:
            print("hello from the worker")  # noqa: T201

    estimator().fit((X, Y), epochs=2, callbacks=[Talk()], **WHOLE)
    assert capfd.readouterr() == ("", "")

    estimator().fit((X, Y), epochs=2, batch_size=50, callbacks=[Talk()])
    shown = capfd.readouterr()
    assert "epoch 2 of 2: " in shown.err
    assert "[worker 1] hello from the worker" in shown.out
