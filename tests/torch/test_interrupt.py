"""Ctrl-C ends a run after a whole step; the model keeps what it has learned, and `fit` goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.callbacks import DriverCallback

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 3)).astype(np.float32)
Y = RNG.normal(size=600).astype(np.float32)


class Interrupt(DriverCallback):
    """Presses Ctrl-C while the workers train."""

    def __init__(self) -> None:
        self.steps = 0
        self.status = ""

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        if fields["step"] > 2 and not self.steps:
            self.steps = fields["step"]
            signal.raise_signal(signal.SIGINT)

    def on_run_end(self, status: str, error: BaseException | None, estimator: Any) -> None:
        self.status = status


def _estimator(**options: Any) -> Estimator:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return Estimator.from_torch(
        model=model, optimizer=adam, loss=nn.MSELoss(), engine="local", **{"workers": 2, **options}
    )


def _weights(estimator: Estimator) -> list[Any]:
    return [parameter.detach().numpy().copy() for parameter in estimator.get_model().parameters()]


def test_the_newest_whole_step_is_kept_and_fit_goes_on_from_there(tmp_path: Path) -> None:
    interrupted, pressed = _estimator(), Interrupt()
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted after step [\d,]+\..* the next fit continues"
    ) as raised:
        interrupted.fit((X, Y), 100_000, 2, callbacks=[pressed], checkpoint=tmp_path, verbose=0)

    step = int(re.search(r"step ([\d,]+)", str(raised.value))[1].replace(",", ""))  # type: ignore[index]
    assert step >= pressed.steps
    assert pressed.status == "killed"
    assert sum(interrupted.history["steps"]) == step
    # The frames of Kindler are not above the user's line.
    assert len(raised.traceback) <= 2

    straight = _estimator()
    straight.fit((X, Y), max_steps=step, batch_size=2, verbose=0)
    for first, second in zip(_weights(interrupted), _weights(straight), strict=True):
        np.testing.assert_array_equal(first, second)
    epoch = interrupted.history[-1]["epoch"]
    resumed, whole = _estimator(), _estimator()
    resumed.fit((X, Y), epochs=epoch, batch_size=2, checkpoint=tmp_path, resume=True, verbose=0)
    whole.fit((X, Y), epochs=epoch, batch_size=2, verbose=0)
    for first, second in zip(_weights(resumed), _weights(whole), strict=True):
        np.testing.assert_array_equal(first, second)
    for estimator in (interrupted, straight):
        estimator.fit((X, Y), epochs=1, batch_size=50, verbose=0)
        assert estimator.history[-1]["epoch"] == epoch + 1
    for first, second in zip(_weights(interrupted), _weights(straight), strict=True):
        np.testing.assert_array_equal(first, second)


def test_workers_that_do_not_meet_in_steps_keep_what_they_have_learned_too() -> None:
    estimator = _estimator()
    before = _weights(estimator)
    with pytest.raises(KeyboardInterrupt, match="interrupted after step"):
        estimator.fit(
            (X, Y), epochs=100_000, batch_size=2, strategy="local_sgd", callbacks=[Interrupt()], verbose=0
        )

    assert any(not np.array_equal(a, b) for a, b in zip(before, _weights(estimator), strict=True))


PROGRAM = """
    import numpy as np
    import torch
    from kindler import Estimator
    from kindler.callbacks import DriverCallback

    class Told(DriverCallback):
        told = False

        def on_progress(self, fields):
            if fields["step"] > 2 and not self.told:
                self.told = True
                print("training", flush=True)

    x = np.ones((600, 3), "float32")
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(3, 1),
        optimizer=torch.optim.SGD,
        loss=torch.nn.MSELoss(),
        workers=2,
        engine="local",
    )
    estimator.fit((x, x[:, 0]), epochs=100_000, batch_size=2, callbacks=[Told()], verbose=0)  # this line
"""


def test_a_script_ends_with_its_own_line_and_what_was_kept_and_no_process_is_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == -signal.SIGINT
    assert "# this line" in shown
    assert "KeyboardInterrupt: training was interrupted after step" in shown
    assert "kindler" not in shown.partition("KeyboardInterrupt")[0].replace(str(tmp_path), "")
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.killpg(process.pid, 0)
