"""Names that torch and torchmetrics do not promise, and that Kindler uses: each is still there."""

from __future__ import annotations

import importlib

import pytest
import torch

pytestmark = pytest.mark.torch

NAMES = (
    "torch:_foreach_add_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_div_ _foreach_mul_ _foreach_norm",
    "torch:_fused_adam_ _fused_adamw_ default_generator",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch.optim.optimizer:_global_optimizer_pre_hooks _global_optimizer_post_hooks",
    "torch.utils._pytree:tree_flatten tree_leaves tree_map tree_unflatten",
)


@pytest.mark.parametrize("names", NAMES)
def test_a_module_has_its_private_names(names: str) -> None:
    module, _, wanted = names.partition(":")
    found = importlib.import_module(module)

    assert [name for name in wanted.split() if not hasattr(found, name)] == []


def test_objects_have_their_private_attributes() -> None:
    import torchmetrics

    layer = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(layer.parameters())
    storage = torch.zeros(2).untyped_storage()
    held = {
        layer: ("_buffers", "_non_persistent_buffers_set"),
        optimizer: ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        storage: ("_cdata",),
        torch.utils.data.DataLoader([1]): ("_iterator",),
        torchmetrics.MeanMetric(): ("_reductions", "_update_count", "_computed"),
    }

    assert [name for owner, names in held.items() for name in names if not hasattr(owner, name)] == []
    assert hasattr(layer.state_dict(), "_metadata")
