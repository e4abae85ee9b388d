"""Checkpoints that another framework has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupted import fit, shaky

from kindler.errors import ConfigError
from kindler.train.checkpoints import Header, write_checkpoint

pytestmark = pytest.mark.torch


def test_a_checkpoint_of_another_framework_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000001-epoch-00001-step-000000001.kindler"
    write_checkpoint(path, Header(framework="keras", epoch=1, step=1), b"state")

    with pytest.raises(ConfigError, match=r"step-000000001\.kindler is a checkpoint from 'keras'"):
        fit(shaky(), folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"step-000000001\.kindler is a checkpoint from 'keras'"):
        shaky().load_checkpoint(path)
