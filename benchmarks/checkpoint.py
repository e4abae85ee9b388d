"""What does a checkpoint cost while training, and what would it cost to wait for it?

An MLP whose weights and Adam state take about 100 MB, one worker with one thread. Odd epochs write two
checkpoints each, even ones none; what an odd one takes longer than the next is what a checkpoint costs: the
median over all pairs, for epochs differ by themselves too. The synchronous cost is that of the same state
frozen, made bytes, hashed and written to the same disk while nothing else happens.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds, seconds, workplace

from kindler.train.triggers import Progress

BATCH = 64
STEPS = 40
PER_EPOCH = 2


def in_odd_epochs(progress: Progress) -> bool:
    """Twice within each odd epoch, never at an epoch's end."""
    return progress.epoch % 2 == 1 and not progress.epoch_ended and progress.step % STEPS in (5, 25)


def main() -> None:
    given = arguments(__doc__, repeats=3)
    epochs = 2 if given.quick else 16
    report = Report("checkpoint", "seconds lost per checkpoint of 100 MB", quick=given.quick)
    with workplace() as folder:
        measured = rounds(
            {
                "waiting for it": lambda: waiting(folder / "waiting"),
                "in the background": lambda: training(folder / "training", epochs),
            },
            repeats=given.repeats,
            warm_up=False,
        )
        size = max(file.stat().st_size for file in (folder / "training").iterdir())
    for name, values in measured.items():
        report.figure(name, values, "s")
    report.ratio(
        "in the background / waiting", measured["in the background"], measured["waiting for it"], at_most=0.1
    )
    report.finish(bytes=size, epochs=epochs)


def training(folder: Path, epochs: int) -> float:
    """Seconds that an epoch with checkpoints takes longer, per checkpoint."""
    import numpy as np
    import torch

    from kindler import Checkpoints, Estimator, RunSettings

    model = wide()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=torch.nn.CrossEntropyLoss(),
        workers=1,
        engine="local",
        settings=RunSettings(threads=1),
    )
    random = np.random.default_rng(0)
    rows = BATCH * STEPS
    data = {"x": random.random((rows, WIDTH), np.float32), "y": random.integers(0, CLASSES, rows)}
    checkpoints = Checkpoints(folder, every=in_odd_epochs)
    estimator.fit(data, epochs=2, batch_size=BATCH, checkpoint=checkpoints, verbose=0)  # warm
    history = estimator.fit(data, epochs=epochs, batch_size=BATCH, checkpoint=checkpoints, verbose=0)
    took = history["seconds"]
    return median((odd - even) / PER_EPOCH for odd, even in zip(took[::2], took[1::2], strict=True))


def waiting(folder: Path) -> float:
    """Seconds to freeze, pack, hash and write the same state."""
    import torch

    from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
    from kindler.train.checkpoints import CheckpointFolder, Header

    torch.set_num_threads(1)
    model = wide()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    replica = TorchReplica(TorchSpec(model=model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss()))
    kept = CheckpointFolder(folder)

    def once() -> None:
        kept.save(Header(framework="torch", epoch=1, step=1), replica.freeze())
        kept.wait()

    once()
    return mean(seconds(once) for _ in range(4))


def wide() -> Any:
    """About 8.4 million weights."""
    from torch import nn

    widths = (WIDTH, 2048, 2048, 1280)
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


if __name__ == "__main__":
    main()
