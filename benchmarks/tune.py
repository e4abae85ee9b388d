"""How much faster are 8 trials on 2 slots than one after another?

Each trial is a run of one worker on the local engine, with one thread; both ways run the same 8 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from _bench import Report, arguments, mlp, seconds

TRIALS, SLOTS = 8, 2
AT_LEAST = 1.7


def main() -> None:
    given = arguments(__doc__, repeats=3)
    rows, epochs = (2_000, 1) if given.quick else (20_000, 6)
    report = Report("tune", f"seconds of {TRIALS} trials, {rows:,} rows, {epochs} epochs", quick=given.quick)
    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(rows, 784)).astype(np.float32),
        "y": random.integers(0, 10, rows),
    }
    _search(data, epochs=1, slots=1, trials=1)  # the process that workers are forked from is warm
    times: dict[int, list[float]] = {1: [], SLOTS: []}
    for _ in range(given.repeats):
        for slots, found in times.items():
            found.append(seconds(lambda slots=slots: _search(data, epochs=epochs, slots=slots)))
    for slots, found in times.items():
        report.figure(f"{slots} slot{'s' if slots > 1 else ''}", found, "s")
    report.ratio("one after another / side by side", times[1], times[SLOTS], at_least=AT_LEAST)
    report.finish(rows=rows, epochs=epochs, trials=TRIALS)


def _search(data: dict[str, Any], *, epochs: int, slots: int, trials: int = TRIALS) -> None:
    import torch

    from kindler import Estimator, RunSettings, tune

    def build(values: dict[str, Any]) -> Estimator:
        model = mlp()
        return Estimator.from_torch(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=values["lr"]),
            loss=torch.nn.CrossEntropyLoss(),
            workers=1,
            settings=RunSettings(threads=1),
        )

    fit = {"epochs": epochs, "batch_size": 256, "feature_cols": "x", "label_cols": "y"}
    space = {"lr": tune.uniform(0.01, 0.1)}
    study = tune.search(
        build, space, data, trials=trials, slots=slots, pruner=None, sampler="random", fit=fit, verbose=0
    )
    if [row["state"] for row in study.trials] != ["finished"] * trials:
        raise RuntimeError(f"not all trials were finished: {study}")


if __name__ == "__main__":
    main()
