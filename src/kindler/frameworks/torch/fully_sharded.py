"""A model whose parameters and optimizer state torch's FSDP divides between ranks.

Outside of training (validation, callbacks, checkpoints) parameters are whole: `unshard` gathers them on all
ranks, `reshard` takes over any changes and releases them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.distributed import fsdp, tensor

from kindler.collective import Collective, GradientExchange
from kindler.errors import ConfigError
from kindler.frameworks.torch import private
from kindler.frameworks.torch.exchange import gpus_of, process_group
from kindler.frameworks.torch.exchange_slices import division_of
from kindler.frameworks.torch.state import state_bytes
from kindler.group import Group

dist: Any = tensor  # their stubs leave out much of what is used here
shard: Any = fsdp


class DefaultGroup(GradientExchange):
    """Every rank makes one."""

    def __init__(self, worker: Group, device: torch.device, *, timeout_s: float) -> None:
        on_gpu = device.type == "cuda"
        if on_gpu:
            _check_own_gpus(gpus_of(worker, device))
        self._stack = ExitStack()
        if not torch.distributed.is_initialized():  # it is, with process_group=True
            self._stack.enter_context(process_group(worker, shared_gpus=not on_gpu, timeout_s=timeout_s))
        self.mesh: Any = torch.distributed.device_mesh.init_device_mesh(device.type, (worker.size,))

    def close(self) -> None:
        self._stack.close()


def _check_own_gpus(gpus: Sequence[bytes]) -> None:
    """NCCL needs a GPU for each worker, and gloo cannot replace it."""
    if len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"strategy='fsdp': {len(gpus)} workers share {len(set(gpus))} GPUs, and each needs its "
            "own.\nHint: strategy='zero1' lets workers share a GPU."
        )


class FullySharded:
    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        mesh: Any,
        collective: Collective,
        modules: Sequence[str] = (),
    ) -> None:
        self._model, self._optimizer, self._mesh, self._collective = model, optimizer, mesh, collective
        _refuse(model, optimizer, modules)
        self._empty = model.state_dict()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        states = {names[id(p)]: optimizer.state[p] for p in list(optimizer.state)}
        for name in sorted(modules, key=lambda name: -name.count(".")):
            shard.fully_shard(model.get_submodule(name), mesh=mesh)
        shard.fully_shard(model, mesh=mesh)
        self._units = [module for module in model.modules() if isinstance(module, shard.FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True)
        self._parts: dict[str, Any] = dict(model.named_parameters())
        self._trained = {name: part.requires_grad for name, part in self._parts.items()}
        optimizer.state = defaultdict(dict)
        for group, held in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = [self._parts[name] for name in held]
            if group.get("fused"):
                group["fused"] = None
        for name, state in states.items():
            optimizer.state[self._parts[name]] = {key: self._cut(value, name) for key, value in state.items()}
        self._gathered: dict[Any, dict[str, Any]] | None = None
        self._is_whole = False
        for name in self._empty:  # only its order, and the versions of modules, are kept
            self._empty[name] = None

    def total(self, number: float) -> float:
        return float(self._collective.sum([np.array([number], np.float64)])[0][0])

    def begin_step(self) -> None:
        self._gathered = None
        self.reshard()

    def unshard(self) -> None:
        """Gather all parameters on all ranks, and keep them; every rank calls it."""
        if not self._is_whole:
            private.prepare_fsdp(self._model)
            for unit in self._units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            self._is_whole = True

    def reshard(self) -> None:
        """Go back to parts, of the parameters as they are now."""
        if not self._is_whole:
            return
        whole = dict(self._model.named_parameters())
        if {name: p.requires_grad for name, p in whole.items()} != self._trained:
            raise ConfigError(
                "strategy='fsdp': parameters were frozen or unfrozen during training, which it does not "
                "support.\nHint: strategy='zero1' can."
            )
        now = {name: self._cut(p.detach(), name).to_local().clone() for name, p in whole.items()}
        for unit in self._units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not self._model, recurse=False)
        with torch.no_grad():
            for name, part in self._parts.items():
                part.to_local().copy_(now[name])
        self._is_whole = False

    def gather(self) -> None:
        """Gather all parameters, and on the first rank the optimizer's state; every rank calls it."""
        self.unshard()
        if self._gathered is not None:
            return
        first = self._collective.rank == 0
        gathered: dict[Any, dict[str, Any]] = {}
        for part in self._parts.values():
            if not (state := self._optimizer.state.get(part)):
                continue
            whole = {k: v.full_tensor() if isinstance(v, dist.DTensor) else v for k, v in state.items()}
            if first:
                gathered[part] = whole
        self._gathered = gathered

    def model_state(self) -> dict[str, Any]:
        """The state dict of whole parameters; asking the model itself would divide them again."""
        self._require_whole()
        named = self._named()
        state: dict[str, Any] = self._empty.copy()
        for name in state:
            state[name] = named[name]
        private.copy_versions(self._empty, state)
        return state

    def load_model(self, state: Mapping[str, torch.Tensor]) -> None:
        """All ranks must load the same values."""
        self._require_whole()
        named = self._named()
        if set(state) != set(self._empty):
            odd = sorted(set(state) ^ set(self._empty))
            raise ConfigError(
                f"these are weights of another model: {', '.join(odd[:5])} are in one of them only."
            )
        with torch.no_grad():
            for name, value in state.items():
                named[name].copy_(value)

    def named(self) -> dict[str, Any]:
        self._require_whole()
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def _named(self) -> dict[str, Any]:
        model = self._model
        return {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise ConfigError(
                "the parameters are divided between the workers here (strategy='fsdp').\n"
                "Hint: they are whole at the end of each epoch; within one, run.save_checkpoint() asks for a"
                " checkpoint in the folder of fit(checkpoint=...)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Only on the first rank, after `gather`."""
        if self._gathered is None or self._collective.rank != 0:
            raise ConfigError(
                "the state of the optimizer is divided between the workers here (strategy='fsdp').\n"
                "Hint: the first worker has it at the end of each epoch; within one, run.save_checkpoint()"
                " asks for a checkpoint in the folder of fit(checkpoint=...)."
            )
        kept, self._optimizer.state = self._optimizer.state, defaultdict(dict, self._gathered)
        try:
            return self._optimizer.state_dict()
        finally:
            self._optimizer.state = kept

    @property
    def nbytes(self) -> int:
        return state_bytes(self._optimizer.state)

    def _cut(self, value: Any, name: str) -> Any:
        """`value` must be whole on all ranks."""
        if not isinstance(value, torch.Tensor) or value.shape != self._parts[name].shape:
            return value
        return dist.distribute_tensor(value, self._mesh, [dist.Shard(0)], src_data_rank=None)


def _refuse(model: torch.nn.Module, optimizer: torch.optim.Optimizer, modules: Sequence[str]) -> None:
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    problems = []
    if division_of(type(optimizer), None) != "elements":
        problems.append(f"optimizer {type(optimizer).__name__} needs whole parameters.")
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        problems.append(
            "the optimizer holds parameters that are not the model's (for example those of a loss)."
        )
    if scalars := [name for name, parameter in named.items() if not parameter.dim()]:
        problems.append(f"parameters without a dimension cannot be divided: {', '.join(scalars[:3])}.")
    if len(kinds := {parameter.dtype for parameter in named.values()}) > 1:
        problems.append(f"parameters must have one dtype; they have {', '.join(sorted(map(str, kinds)))}.")
    if extra := [name for name in model.state_dict() if name.endswith("_extra_state")]:
        problems.append(f"the model has state in addition to parameters and buffers: {extra[0]!r}.")
    known = {name for name, _ in model.named_modules() if name}
    if unknown := [name for name in modules if name not in known]:
        problems.append(f"modules={list(modules)!r}: the model has no {unknown[0]!r}.")
    if problems:
        raise ConfigError(
            f"strategy='fsdp': {' '.join(problems)}\nHint: strategy='zero1' divides the optimizer alone."
        )
