"""Names of torch that a release may change without notice; `test_private_names.py` uses each.

Those of torchmetrics are in `metrics.py` alone, and those of Lightning in `lightning_replica.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import optimizer as _hooks
from torch.utils import _pytree

foreach_add_, foreach_div_, foreach_mul_ = torch._foreach_add_, torch._foreach_div_, torch._foreach_mul_
foreach_copy_, foreach_norm = torch._foreach_copy_, torch._foreach_norm
fused_adam_, fused_adamw_ = torch._fused_adam_, torch._fused_adamw_
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map


def compile_error() -> type[Exception]:
    """Of a model that `torch.compile` cannot compile."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def is_watched(optimizer: Any) -> bool:
    """Whether `step` does more than move parameters."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _hooks._global_optimizer_pre_hooks
        or _hooks._global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    )


def persistent_buffers(module: torch.nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name


def copy_versions(source: Any, target: Any) -> None:
    """Of the modules of a state dict, which copying it drops."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


def storage_of(value: Any) -> tuple[Any, torch.dtype | None] | None:
    """The memory of a storage with its dtype, if it has one; None for anything else."""
    if isinstance(value, torch.storage.TypedStorage):
        return value._untyped_storage, value.dtype  # its method for that is deprecated
    return (value, None) if isinstance(value, torch.UntypedStorage) else None


def typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def drop_iterator(loader: Any) -> None:
    """The worker processes of a DataLoader end with it, if this is the last reference."""
    loader._iterator = None


def prepare_fsdp(model: Any) -> None:
    """As its first forward would."""
    model._get_fsdp_state()._lazy_init()
