"""Ctrl-C on Spark: the run ends after a whole step, and the session goes on."""

from __future__ import annotations

import functools
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from kindler import Columns, Estimator
from kindler.callbacks import DriverCallback

pytestmark = [pytest.mark.spark, pytest.mark.torch]

COLUMNS: dict[str, Any] = {
    "feature_cols": "x",
    "label_cols": "y",
    "columns": Columns(stack_features=True),
    "verbose": 0,
}


class Interrupt(DriverCallback):
    """Presses Ctrl-C while the workers train."""

    pressed = False

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        if fields["step"] > 2 and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def test_what_was_trained_is_kept_and_the_session_goes_on(spark: Any) -> None:
    frame = spark.range(400).selectExpr("cast(id % 7 as float) as x", "cast(id % 5 as float) as y")
    estimator = Estimator.from_torch(
        model=functools.partial(nn.Linear, 1, 1),
        optimizer=functools.partial(torch.optim.SGD, lr=0.001),
        loss=nn.MSELoss(),
        workers=2,
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="training was interrupted after step"):
        estimator.fit(frame, epochs=100_000, batch_size=2, callbacks=[Interrupt()], **COLUMNS)

    assert signal.getsignal(signal.SIGINT) is handler  # PySpark's own
    epoch = estimator.history[-1]["epoch"]
    assert estimator.fit(frame, batch_size=100, **COLUMNS)[0]["epoch"] == epoch + 1
    assert frame.count() == 400
