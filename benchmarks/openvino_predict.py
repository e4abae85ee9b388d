"""How fast does OpenVINO score a frame against the same model in PyTorch?

Rows of one Parquet file, local[2], one thread a process, batches of 256, consumed by Spark's noop sink. Two
models: the MLP of the other benchmarks on 784 floats, and a small convolutional network on the same numbers
as images of 28 x 28, where computing the model takes most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, mlp, rounds, seconds, spark_session, workplace, write_rows

from kindler import Columns

BATCH = 256


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count = 2_048 if given.quick else ROWS
    report = Report(
        "openvino_predict", f"rows/s of scoring {count:,} x {WIDTH} floats on 2 cores", quick=given.quick
    )
    with workplace() as folder:
        frame_path = write_rows(folder / "rows.parquet", count)
        frame = spark_session(2).read.parquet(str(frame_path))
        ways: dict[str, Callable[[], float]] = {}
        for name, model in (("MLP", mlp()), ("CNN", cnn())):
            estimator = _estimator(model)
            for runtime in (None, "openvino"):
                ways[f"{name}, {runtime or 'torch'}"] = lambda est=estimator, runtime=runtime: seconds(
                    lambda: _drain(_predict(est, frame, runtime))
                )
        spent = rounds(ways, repeats=given.repeats, warm_up=not given.quick)
    speed = {name: [count / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    for name in ("MLP", "CNN"):
        report.ratio(f"{name}: OpenVINO / PyTorch", speed[f"{name}, openvino"], speed[f"{name}, torch"])
    report.finish(rows=count, batch_size=BATCH)


def cnn() -> Any:
    """Three convolutions and a layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def _estimator(model: Any) -> Any:
    from kindler import Estimator
    from kindler.config import RunSettings

    return Estimator.from_torch(model=model, workers=2, settings=RunSettings(threads=1))


def _predict(estimator: Any, frame: Any, runtime: str | None) -> Any:
    return estimator.predict(
        frame,
        BATCH,
        feature_cols="features",
        columns=Columns(shapes={"features": (WIDTH,)}),
        verbose=0,
        accelerator=runtime,
    ).select("prediction")


def _drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
