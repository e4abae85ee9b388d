"""What is drawn of a space, and whose a study is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import optuna
import pytest

from kindler.errors import ConfigError
from kindler.tune import choice, integer
from kindler.tune.space import Space
from kindler.tune.study import _began, claim


def test_a_study_of_a_process_that_still_runs_is_left_to_it() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owned = optuna.create_study()
        owner = {"host": socket.gethostname(), "pid": sleeper.pid, "since": _began(sleeper.pid)}
        owned.set_user_attr("kindler:owner", owner)
        with pytest.raises(ConfigError, match=f"being run by process {sleeper.pid}"):
            claim(owned)
        owned.set_user_attr("kindler:owner", {**owner, "since": "1"})  # the number was given out again
        claim(owned)
    finally:
        sleeper.communicate(b"\n")


def test_choices_of_any_kind_are_drawn_and_recorded_by_number() -> None:
    measures = choice([len, sum])
    space = Space({"measure": measures, "width": integer(1, 8, log=True), "fixed": 3})
    trial, drawn = space.ask(optuna.create_study())

    assert drawn["measure"] in (len, sum)
    assert drawn["fixed"] == 3
    json.dumps(trial.params)
    assert measures.value(trial.params["measure"]) is drawn["measure"]
