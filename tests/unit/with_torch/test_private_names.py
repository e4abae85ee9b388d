"""Names that torch, torchmetrics and Lightning do not promise, and that Kindler uses: each still works."""

from __future__ import annotations

import pytest
import torch

from kindler.frameworks.torch import private

pytestmark = pytest.mark.torch


def test_torch_has_its_private_names() -> None:
    layer = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(layer.parameters())
    loader: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader([1])  # type: ignore[arg-type]
    typed = torch.zeros(2).storage()
    storage = private.storage_of(typed)

    assert not private.is_watched(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert private.is_watched(optimizer)
    assert list(private.persistent_buffers(layer)) == ["running_mean", "running_var", "num_batches_tracked"]
    assert hasattr(layer.state_dict(), "_metadata")
    assert storage is not None
    assert hasattr(storage[0], "_cdata")
    assert private.typed_storage(*storage).dtype is torch.float32
    assert hasattr(loader, "_iterator")
    private.drop_iterator(loader)
    assert private.tree_map(lambda leaf: leaf + 1, {"a": [1]}) == {"a": [2]}


def test_metrics_have_their_private_attributes() -> None:
    import torchmetrics

    metric = torchmetrics.MeanMetric()

    assert all(hasattr(metric, name) for name in ("_reductions", "_update_count", "_computed"))


def test_lightning_modules_find_their_trainer_under_a_private_name() -> None:
    lightning = pytest.importorskip("lightning")
    module = lightning.LightningModule()

    module.__dict__["_trainer"] = trainer = object()

    assert module.trainer is trainer
