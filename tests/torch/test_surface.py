"""What an Estimator promises at its surface: when a run ends, what can be loaded, and what errors say."""

from __future__ import annotations

import functools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Checkpoints, Epochs, Estimator
from kindler.callbacks import Callback, ModelCheckpoint
from kindler.errors import ConfigError, DiskFullError, UntrustedError, WorkerError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
DATA = (X, X.sum(1, keepdims=True))
OPTIONS: dict[str, Any] = {"batch_size": 8, "verbose": 0}


def estimator(model: Any = None, **options: Any) -> Estimator:
    given: dict[str, Any] = {
        "model": model or functools.partial(torch.nn.Linear, 3, 1),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.1),
        "loss": torch.nn.MSELoss(),
        "workers": 1,
        "engine": "local",
    }
    return Estimator.from_torch(**{**given, **options})


def weights(est: Estimator) -> list[float]:
    return [x for p in est.get_model().parameters() for x in p.detach().flatten().tolist()]


def test_max_steps_alone_trains_to_that_step_through_as_many_epochs_as_it_takes() -> None:
    est = estimator()

    assert est.fit(DATA, max_steps=7, **OPTIONS)["steps"] == [3, 3, 1]
    assert est.fit(DATA, max_steps=3, **OPTIONS)["steps"] == [3]
    assert estimator().fit(DATA, max_steps=7, epochs=2, **OPTIONS)["steps"] == [3, 3]


def test_the_best_epoch_is_chosen_among_those_that_were_validated(tmp_path: Path) -> None:
    est = estimator()

    history = est.fit(
        DATA,
        epochs=Epochs(5, validation_freq=2),
        validation_data=DATA,
        checkpoint=Checkpoints(tmp_path, keep=1, best="max:val_loss"),
        **OPTIONS,
    )

    assert ["val_loss" in row for row in history] == [False, True, False, True, False]
    kept = sorted(path.name.split("-")[3] for path in tmp_path.glob("*.kindler"))
    assert kept == ["00002", "00005"]  # the loss only falls, so the first that was judged has most of it
    unknown = Checkpoints(tmp_path, best="val_auc")
    with pytest.raises(ConfigError, match=r"Checkpoints\(best='val_auc'\): not a metric of this run"):
        est.fit(DATA, epochs=1, validation_data=DATA, checkpoint=unknown, **OPTIONS)


def test_what_cannot_be_pickled_is_named_with_its_place_before_a_worker_starts() -> None:
    lock = threading.Lock()

    def model(config: Any) -> torch.nn.Module:
        with lock:
            return torch.nn.Linear(3, 1)

    class Holds(Callback):
        def __init__(self, held: Any) -> None:
            self.held = held

    with pytest.raises(ConfigError, match=r"model, 'lock' of .*model\(\) cannot be sent .*_thread\.lock"):
        estimator(model).fit(DATA, **OPTIONS)
    with pytest.raises(ConfigError, match=r"callbacks, item 0, attribute 'held' of Holds .*generator"):
        estimator().fit(DATA, callbacks=[Holds(number for number in range(3))], **OPTIONS)


class TooHotError(ValueError):
    """An exception of the user's own whose constructor needs arguments."""

    def __init__(self, degrees: float, *, where: str) -> None:
        super().__init__(f"{degrees} degrees at {where}")
        self.degrees, self.where, self.readings = degrees, where, (1, {"a": b"x"})
        self.thermometer = object()


class Raises(Callback):
    def __init__(self, make: Any) -> None:
        self.make = make

    def on_epoch_begin(self, run: Any) -> None:
        raise self.make()


def test_an_exception_of_the_users_own_keeps_its_type_and_plain_attributes() -> None:
    class OnlyHereError(RuntimeError):
        code = 0

    def only_here() -> Exception:
        error = OnlyHereError("no")
        error.code = 42
        return error

    with pytest.raises(TooHotError, match=r"41\.5 degrees at the oven") as caught:
        estimator().fit(DATA, callbacks=[Raises(lambda: TooHotError(41.5, where="the oven"))], **OPTIONS)
    assert isinstance(caught.value, WorkerError)
    assert (caught.value.degrees, caught.value.where) == (41.5, "the oven")
    assert caught.value.readings == (1, {"a": b"x"})
    assert not hasattr(caught.value, "thermometer")  # no plain value: nothing is unpickled from workers
    with pytest.raises(OnlyHereError, match="no") as local:
        estimator().fit(DATA, callbacks=[Raises(only_here)], **OPTIONS)
    assert local.value.code == 42
    with pytest.raises(FileNotFoundError) as missing:
        estimator().fit(DATA, callbacks=[Raises(lambda: FileNotFoundError(2, "gone", "/a"))], **OPTIONS)
    assert (missing.value.errno, missing.value.filename) == (2, "/a")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a quarter of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs more rights than this user has")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_named_with_what_was_needed_and_what_is_free(tiny_disk: Path) -> None:
    large = functools.partial(torch.nn.Linear, 3, 100_000)
    wide = {"x": X, "y": np.zeros((24, 100_000), np.float32)}
    est = estimator(large, optimizer=torch.optim.SGD)

    with pytest.raises(
        DiskFullError, match=r"no space left for [\d,]+ bytes at .*/disk/run/checkpoint-"
    ) as caught:
        est.fit(wide, epochs=1, checkpoint=tiny_disk / "run", **OPTIONS)
    assert caught.value.needed_bytes is not None
    assert 0 <= caught.value.free_bytes <= 256 * 1024 < caught.value.needed_bytes
    with pytest.raises(DiskFullError, match=r"no space left at .*/disk/model\.pt: No space left"):
        est.save(tiny_disk / "model.pt")
    assert not list(tiny_disk.rglob("*.p*t"))


def test_the_data_of_a_run_on_a_full_disk_is_named_too(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tiny_disk))

    with pytest.raises(DiskFullError, match=r"no space left .*/disk/kindler-driver-"):
        estimator().fit((np.zeros((200_000, 3), np.float32), np.zeros((200_000, 1), np.float32)), **OPTIONS)


def test_the_latest_checkpoint_may_be_one_that_a_callback_wrote(tmp_path: Path) -> None:
    by_run, by_callback = tmp_path / "run", tmp_path / "mine"
    est = estimator()
    saving = ModelCheckpoint(by_callback / "epoch-{epoch}.ckpt")
    est.fit(DATA, epochs=2, callbacks=[saving], checkpoint=by_run, **OPTIONS)
    (by_callback / "epoch-9.ckpt").write_bytes(b"kindler checkpoint\nbroken")
    (by_callback / "notes.txt").write_text("no checkpoint")

    found = Estimator.latest_checkpoint(by_callback)

    assert found == str(by_callback / "epoch-2.ckpt")
    assert weights(estimator().load_checkpoint(found)) == weights(est)
    assert "epoch-00002" in str(Estimator.latest_checkpoint(by_run))
    assert Estimator.latest_checkpoint(tmp_path / "nowhere") is None


def test_an_estimator_is_loaded_from_one_file_and_trains_on_with_its_optimizer(tmp_path: Path) -> None:
    est, whole = estimator(seed=3), estimator(seed=3)
    est.fit(DATA, epochs=2, **OPTIONS)
    est.save(tmp_path / "line.estimator")

    with pytest.raises(UntrustedError, match=r"line\.estimator was rejected: it holds a model's code"):
        Estimator.load(tmp_path / "line.estimator")
    again = Estimator.load(tmp_path / "line.estimator", trusted=True)

    assert list(again.history) == list(est.history)
    assert again.history.goodput == est.history.goodput is not None
    assert again.predict(X) == pytest.approx(est.predict(X))
    again.fit(DATA, epochs=1, **OPTIONS)
    whole.fit(DATA, epochs=3, **OPTIONS)
    assert weights(again) == weights(whole)
    with pytest.raises(ConfigError, match="seed is in the file and cannot be passed"):
        Estimator.load(tmp_path / "line.estimator", trusted=True, seed=4)
    (tmp_path / "other.pt").write_bytes(b"something")
    with pytest.raises(ConfigError, match="is not a saved estimator"):
        Estimator.load(tmp_path / "other.pt", trusted=True)
