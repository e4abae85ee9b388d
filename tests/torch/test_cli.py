"""`kindler models put` and `predict` with a program of torch.export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kindler import cli

pytestmark = pytest.mark.torch


def test_an_exported_program_is_stored_and_predicts_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINDLER_STORE", str(tmp_path / "store"))
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    dynamic = ({0: torch.export.Dim("rows", min=1, max=64)},)
    torch.export.save(torch.export.export(model, (rows,), dynamic_shapes=dynamic), "net.pt2")
    np.save("rows.npy", rows.numpy())

    assert cli.main(["models", "put", "net.pt2", "net"]) == 1
    assert cli.main(["models", "put", "net.pt2", "net", "--trusted"]) == 0
    assert cli.main(["predict", "net", "--input", "rows.npy"]) == 1
    assert "trusted" in capsys.readouterr().err
    assert cli.main(["predict", "net", "--input", "rows.npy", "--trusted"]) == 0

    found = json.loads(capsys.readouterr().out)["predictions"]
    np.testing.assert_allclose(found, model(rows).detach().numpy(), rtol=1e-6)
    assert cli.main(["models", "get", "net", "again.pt2"]) == 0
    assert Path("again.pt2").read_bytes() == Path("net.pt2").read_bytes()
