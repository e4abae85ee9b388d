"""How long does a run stand still when a worker is lost?

Two local workers; the second ends itself with SIGKILL after a step, again and again. From then to the end of
the next step that is new: noticing the loss, a new process, opening the data, the state, one step. Another
process takes its place. With `--cluster`: executors of a standalone cluster of Spark end by SIGKILL; seconds
count also from when Spark has another executor. With `--goodput`: the share of its time that a run of three
minutes trains in, if it loses a worker every 20 seconds.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, workplace

from kindler import Checkpoints, RunSettings
from kindler.callbacks import Callback

ROWS, BATCH = 8_192, 256
FIRST, APART = 15, 20  # steps before the first loss, and between two
LOSS_EVERY_S, GOODPUT_S = 20.0, 180.0


def main() -> None:
    given = arguments(
        __doc__,
        repeats=10,
        goodput="also measure a run that loses a worker every 20 s",
        cluster="measure lost executors of Spark instead",
    )
    if given.cluster:
        on_cluster(given)
        return
    report = Report("recovery", "seconds from SIGKILL to the next new step", quick=given.quick)
    with workplace() as folder:
        seconds, repeated, equal = lost(folder / "torch", on_torch, losses=given.repeats)
        report.figure("torch", seconds, "s")
        report.limit("torch, steps repeated", [repeated], "steps", at_most=0)
        report.limit("torch, weights that differ", [0 if equal else 1], "", at_most=0)
        for backend in ("torch", "tensorflow", "jax"):
            name = f"keras on {backend}"
            # A process has one backend of Keras.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                measured = pool.submit(lost_by_keras, folder / name, backend, losses=given.repeats).result()
            report.figure(name, measured[0], "s")
            report.limit(f"{name}, steps repeated", [measured[1]], "steps", at_most=0)
            report.limit(f"{name}, weights that differ", [0 if measured[2] else 1], "", at_most=0)
        if given.goodput:
            wanted_s = GOODPUT_S / 20 if given.quick else GOODPUT_S
            undisturbed, disturbed, equal = goodput(folder, wanted_s)
            report.ratio("goodput", undisturbed, disturbed, at_least=0.9)
            report.limit("goodput, weights that differ", [0 if equal else 1], "", at_most=0)
    report.finish(rows=ROWS, batch_size=BATCH)


def lost_by_keras(folder: Path, backend: str, *, losses: int) -> tuple[list[float], int, bool]:
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="2")
    return lost(folder, on_keras, losses=losses)


def on_cluster(given: Any) -> None:
    import kindler
    from kindler.spark.versions import executor_summaries

    report = Report(
        "recovery_cluster", "seconds from a lost executor to the next new step", quick=given.quick
    )
    there: dict[str, float] = {}  # since when, by executor
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            for each in executor_summaries(spark):
                there[str(each.id())] = each.addTime().getTime() / 1000

    with workplace() as folder:
        spark = kindler.init("local-cluster[2,1,1024]", conf={"spark.ui.enabled": "false"})
        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds, repeated, equal = lost(folder / "torch", on_torch, losses=given.repeats, engine="spark")
        ended.set()
        watcher.join()
        since = []
        for number in range(given.repeats):
            killed, again = (
                float((folder / "torch" / f"{what}-{number}").read_text()) for what in ("killed", "again")
            )
            since.append(again - min(came for came in there.values() if killed < came < again))
        report.figure("from the loss", seconds, "s")
        report.limit("from another executor", since, "s", at_most=3.0)
        report.limit("steps repeated", [repeated], "steps", at_most=0)
        report.limit("weights that differ", [0 if equal else 1], "", at_most=0)
        kindler.stop()
    report.finish(rows=ROWS, batch_size=BATCH)


def lost(
    folder: Path, make: Any, *, losses: int, checkpoint: bool = False, engine: str = "local"
) -> tuple[list[float], int, bool]:
    """Seconds for each loss, steps that were made twice, and whether the weights are the undisturbed ones."""
    steps = FIRST + APART * losses
    alone = run(make, None, steps, engine=engine)
    folder.mkdir()
    estimator = run(make, folder, steps, losses=losses, checkpoint=checkpoint, engine=engine)
    made = [int(line) for line in (folder / "steps").read_text().split()]
    seconds = [
        float((folder / f"again-{number}").read_text()) - float((folder / f"killed-{number}").read_text())
        for number in range(losses)
    ]
    return seconds, len(made) - len(set(made)), same(estimator, alone)


def run(
    make: Any,
    folder: Path | None,
    steps: int,
    *,
    losses: int = 0,
    every_s: float = 0.0,
    checkpoint: bool = False,
    engine: str = "local",
) -> Any:
    import numpy as np

    from kindler import Epochs

    random = np.random.default_rng(0)
    data = {"x": random.random((ROWS, WIDTH), np.float32), "y": random.integers(0, CLASSES, ROWS)}
    settings = RunSettings(threads=1, max_failures=1_000)
    estimator, callback = make(folder and str(folder), workers=2, engine=engine, settings=settings)
    if folder is not None:
        callback.losses, callback.every_s = losses, every_s
    estimator.fit(
        data,
        epochs=Epochs(1, steps_per_epoch=steps),
        batch_size=BATCH,
        callbacks=[callback] if folder is not None else [],
        checkpoint=Checkpoints(folder / "checkpoints", every=10)
        if folder is not None and checkpoint
        else None,
        verbose=0,
    )
    return estimator


def same(one: Any, other: Any) -> bool:
    models = [estimator.get_model() for estimator in (one, other)]
    if hasattr(models[0], "get_weights"):
        return all(bool((a == b).all()) for a, b in zip(*(m.get_weights() for m in models), strict=True))
    weights = [model.state_dict() for model in models]
    return all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[1])


def goodput(folder: Path, wanted_s: float) -> tuple[list[float], list[float], bool]:
    """Seconds of an undisturbed run of about `wanted_s`, and of the same one that loses workers; and whether
    both end with the same weights."""
    timed(lambda: run(on_torch, None, 10))  # starts the process that workers are forked from
    (few, _), (many, _) = (timed(lambda steps=steps: run(on_torch, None, steps)) for steps in (100, 600))
    steps = 100 + int((wanted_s - few) / max(many - few, 1e-3) * 500)
    place = folder / "goodput"
    place.mkdir()
    whole, alone = timed(lambda: run(on_torch, None, steps))
    lossy, estimator = timed(lambda: run(on_torch, place, steps, every_s=LOSS_EVERY_S))
    return [whole], [lossy], same(estimator, alone)


def timed(work: Callable[..., Any]) -> tuple[float, Any]:
    """The seconds that it took, and what it returned."""
    began = time.perf_counter()
    made = work()
    return time.perf_counter() - began, made


class Marks:
    """After each step: rank 1 dies where it is due; rank 0 notes its steps, and the first new one after."""

    folder = ""
    losses = 0
    every_s = 0.0

    def mark(self, rank: int, step: int) -> None:
        place = Path(self.folder)
        if self.every_s:
            if rank == 1:
                self._die_in_time(place)
            return
        number = (step - FIRST) // APART
        if rank == 1 and step == FIRST + APART * number and 0 <= number < self.losses:
            self._die_once(place / f"killed-{number}")
        elif rank == 0:
            with (place / "steps").open("a") as file:
                file.write(f"{step}\n")
            again = place / f"again-{number}"
            if 0 <= number < self.losses and step > FIRST + APART * number and not again.exists():
                again.write_text(json.dumps(time.time()))

    def _die_once(self, marker: Path) -> None:
        if not marker.exists():
            marker.write_text(json.dumps(time.time()))
            os.kill(self._executor() or os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # an executor's workers end a little later

    def _executor(self) -> int | None:
        """Spark's executor whose task this process works for: it has inherited its environment."""
        import psutil

        folders = os.environ.get("SPARK_EXECUTOR_DIRS")
        for process in psutil.process_iter(["cmdline"]) if folders is not None else ():
            runs = "org.apache.spark.executor.CoarseGrainedExecutorBackend" in (process.info["cmdline"] or [])
            if runs and process.environ().get("SPARK_EXECUTOR_DIRS") == folders:
                return int(process.pid)
        return None

    def _die_in_time(self, place: Path) -> None:
        last = place / "last"
        if not last.exists():
            last.touch()
        elif time.time() - last.stat().st_mtime > self.every_s:
            last.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Dies(Marks, Callback):
    def __init__(self, folder: str | None) -> None:
        self.folder = folder or ""

    def on_step_end(self, run: Any) -> None:
        self.mark(run.rank, run.step)


def on_torch(folder: str | None, **options: Any) -> Any:
    import torch
    from _bench import mlp

    from kindler import Estimator

    torch.manual_seed(0)
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    loss = torch.nn.CrossEntropyLoss()
    return Estimator.from_torch(model=model, optimizer=adam, loss=loss, **options), Dies(folder)


def on_keras(folder: str | None, **options: Any) -> Any:
    import keras

    from kindler import Estimator

    class KerasDies(Marks, keras.callbacks.Callback):
        def __init__(self, folder: str) -> None:
            super().__init__()
            self.folder = folder

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.mark(self.params["rank"], batch + 1)

    return Estimator.from_keras(model=keras_mlp, **options), KerasDies(folder or "")


def keras_mlp(config: Any) -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


if __name__ == "__main__":
    main()
