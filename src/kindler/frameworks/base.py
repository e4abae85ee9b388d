"""What every framework has in common: all that follows from the methods that `contract.py` asks for.

States and weights as bytes, the sums that several ranks counted, buffers that they merge, where an epoch goes
on. A framework overrides what it can do faster, and what only it can do; defaults say that it cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from kindler.collective import Array, Batch, Collective, GradientExchange, Gradients, share_bytes
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.frameworks.contract import Facts, Scored, Use, Variables
from kindler.frameworks.merged_buffers import mean_by_name, merge_over_ranks, merge_parts
from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.state_format import Buffer, ScoringModel, pack, unpack
from kindler.group import Group

if TYPE_CHECKING:
    from kindler.train.loss_guard import LossGuard

_MODEL = ("parameters", "buffers")


class BaseReplica:
    """A replica; subclasses are made with the same options.

    Attributes:
        device: Where it computes.
        model: What callbacks see as the model.
        optimizer: What they see as the optimizer; None where there is none.
        divisible: Whether several parameter servers can share its parameters: `apply` takes None for one that
            is left alone, and there is `join_parts`.
        takes_read_only: Whether `predict` takes arrays that must not be written to, as they are.
        output_names: What the model called the outputs that it returned last; None where they have no names.
        mode: How it makes its steps, where it was left a choice.

    Args:
        spec: What `make_spec` gave.
        device: "auto", "cpu", "cuda" (one GPU a rank) or "cuda:0".
        rank: This rank; randomness other than that of the first weights differs by it.
        local_rank: Its number on its host, which chooses the GPU.
        seed: What the random numbers of creators start from.
        threads: Compute threads; None leaves the process as it is.
        feature_names: Names of the features.
        label_names: Names of the labels.
        label_shapes: Where rows of one batch may have another shape than those of another: the shape of a row
            of each label in the first batch. Otherwise None.
    """

    divisible = False
    takes_read_only = False
    model: Any = None
    optimizer: Any = None
    mode: str | None = None
    output_names: tuple[str, ...] | None = None

    def __init__(
        self,
        spec: Any,
        *,
        device: str = "cpu",
        rank: int = 0,
        local_rank: int = 0,
        seed: int = 0,
        threads: int | None = None,
        feature_names: Sequence[str] = (),
        label_names: Sequence[str] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.spec, self.rank, self.seed = spec, rank, seed
        self.device: Any = device
        self.epoch = self.step = self.epoch_rows = 0
        self._collective: Collective | None = None
        self._before: dict[str, bytes] = {}
        self._sums: dict[str, float] = {}
        self._rows = 0.0
        seed_own(seed)

    # What the user gave.

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        return options

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """A pickle, with the code that the user's own modules hold."""
        return pickle_for_workers(spec)

    @classmethod
    def loads(cls, data: bytes) -> Any:
        return cloudpickle.loads(data)

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> Any:
        """A replica of what `dumps` packed."""
        return cls(cls.loads(spec), **options)

    @classmethod
    def facts(cls, spec: Any) -> Facts:
        return Facts()

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        if use == "parts" and not cls.divisible:
            return ["the parameters of this framework's models cannot be divided."]
        if use == "division":
            complaint = "only the optimizer of a PyTorch model can be divided between workers."
            return [f"{complaint}\nHint: sync='allreduce' has the same result."]
        return []

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        """A spec that nobody else holds, with these entries of its config and this rate, unless it is None.

        Raises:
            ConfigError: It has no place for them.
        """
        if learning_rate is not None:
            raise ConfigError(
                "the learning rate of this model cannot be set from outside.\n"
                "Hint: read it from the config in a creator, and give config={...}."
            )
        return with_config(spec, config)

    @classmethod
    def scoring_model(
        cls, spec: Any, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        """The model as it is now, for processes that only score with it.

        Frameworks that can tell it apart leave out what only training needs.

        Args:
            spec: What the user gave.
            live: The model of this class in this process, if it was made. The user may have changed it.
            state: Gives the trained state; empty if there is none.
            before: What this gave last; it is given again where nothing has changed.
        """
        return ScoringModel.of(cls.dumps(spec), state(), before)

    # Predicting.

    @property
    def on_gpu(self) -> bool:
        return False

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        raise NotImplementedError

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        """What `predict` gives for each of the batches, in their order.

        A few may be under way at a time: it may ask for up to six more before it gives back the first.
        """
        for batch in batches:
            outputs = self.predict(batch)
            yield Scored(len(batch[0]), outputs, self.output_names)

    def set_precision(self, precision: str) -> None:
        """Compute in one of the precisions of the framework's row from now on."""
        raise ConfigError(f"models of this framework cannot compute in {precision}.")

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Write the model as "onnx" or "openvino" (an .xml file and a .bin file); its row says if it can.

        `features` are a few rows of each input, of which `predict` was called before.
        """
        raise ConfigError(f"models of this framework cannot be written as {form}.")

    def trained_model(self) -> Any:
        """The model itself, ready to predict; the user's own instance where one was given."""
        return self.model

    def stored_model(self) -> Any:
        """What a kind of models (`kindler.models`) writes: the model, or it with what belongs to it."""
        return self.trained_model()

    # Training.

    def expect(self, features: Sequence[Array]) -> None:
        """Inputs of these shapes will come; the arrays have no rows. Called before states are loaded."""

    def restore_requires_grad(self) -> None:
        """Take from the user's own model what it says besides weights (what is frozen), not from a state."""

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        """Keep these columns where the model computes, if that pays; a function for each that takes rows."""
        return None

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        """Multiply the losses of rows by weights, where the row in the registry says `row_weights`.

        Args:
            classes: Weights by class number, for training.
            column: Whether the last label column of every batch is a weight.
        """
        raise ConfigError(f"{type(self).__name__} takes no weights of rows.")

    def watch_losses(self, watch: LossGuard) -> None:
        """Show `watch` the loss of every training step, where the row in the registry says so.

        Where it `skips`, a step with a loss that is not finite on some rank leaves weights, optimizer and
        buffers on all ranks as they were; only `step` counts it.
        """

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; at most once. Buffers are merged through this from now on."""
        self._collective = collective
        if collective.size > 1:
            self.load_state(share_bytes(collective, self.state() if collective.rank == 0 else b""))

    @property
    def _others(self) -> Collective | None:
        """What joins this replica to others; None where there are none."""
        return self._collective if self._collective is not None and self._collective.size > 1 else None

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """From now on let `train_step` exchange gradients itself; None where the framework cannot.

        Args:
            worker: This worker; every rank calls it.
            settings: Time limits, and whether workers of one machine exchange through shared memory.
            strategy: "allreduce"; or "sharded", which divides the optimizer, or "fsdp", which divides the
                parameters as well, between ranks.
            options: Those of the sync of that name.
        """
        return None

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.epoch_rows = epoch, 0
        seed_own(self.seed, epoch, self.rank)
        if self._others is not None:
            self._before = {name: array.tobytes() for name, array in self._buffers().items()}

    def train_step(self, batch: Batch) -> None:
        if batch.global_rows:
            self.apply(self.gradients(batch).arrays)

    def gradients(self, batch: Batch) -> Gradients:
        raise ConfigError(
            "this sync asks each worker for its gradients, but a train_step or LightningModule moves the"
            " parameters itself.\nHint: sync='allreduce'."
        )

    def apply(self, gradients: Sequence[Array]) -> None:
        raise NotImplementedError

    def pass_step(self) -> None:
        """Let a schedule that moves by steps go on, where others step and this rank has no rows."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """There is no schedule."""

    def eval_step(self, batch: Batch) -> None:
        raise NotImplementedError

    def learning_rate(self) -> float:
        return float("nan")

    def rates(self) -> list[float]:
        """The optimizer's learning rates that may be set, one a group of parameters; empty where none may."""
        return []

    def set_rates(self, rates: Sequence[float]) -> None:
        """There are none."""

    # Parameters as arrays.

    def variables(self, *groups: str) -> Variables:
        raise NotImplementedError

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        raise NotImplementedError

    def names(self) -> list[str]:
        """What the trained parameters are called."""
        return list(self.variables("parameters")["parameters"])

    def read(self) -> list[Array]:
        """Copies of the trained parameters, in the order of `names`."""
        return list(self.variables("parameters")["parameters"].values())

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""
        self.assign({"parameters": dict(zip(self.names(), arrays, strict=True))})

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters into these arrays, of their shapes and dtypes."""
        for into, array in zip(arrays, self.read(), strict=True):
            np.copyto(into, array)

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """One state out of those of servers that looked after the parameters of these places; `divisible`."""
        raise NotImplementedError

    # Buffers.

    def _buffers(self) -> dict[str, Array]:
        return self.variables("buffers").get("buffers", {})

    def _means_of_variances(self) -> dict[str, str]:
        """For each buffer that is a variance the one that is its mean."""
        pairs = ((name, mean_by_name(name)) for name in self._buffers())
        return {name: mean for name, mean in pairs if mean is not None}

    def merge_buffers(self) -> None:
        """Make what training changed besides parameters the same on all ranks, before it is judged.

        What no rank has changed (frozen weights, tables) is left alone: its mean would be rounded.
        """
        own = self._buffers() if self._others is not None else {}
        if self._others is None or not own:
            return
        # Bytes, so that NaN is equal to itself.
        changed = [self._before.get(name) != array.tobytes() for name, array in own.items()]
        [flags] = self._others.sum([np.array(changed, np.int64)])
        moved = {name: own[name] for name, flag in zip(own, flags, strict=True) if flag}
        merged = merge_over_ranks(self._others, moved, self.epoch_rows, self._means_of_variances())
        self.assign({"buffers": merged})

    # What is counted.

    def count(self, rows: float, **means: float) -> None:
        """Note means over so many rows: the loss, and metrics."""
        self._rows += rows
        for name, mean in means.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(mean) * rows

    def take_tallies(self) -> bytes:
        """This rank's sums and metric states since they were last taken; counting starts anew."""
        tallies = json.dumps(self._counted()).encode()
        self._count_on_from([])
        return tallies

    def _counted(self) -> Any:
        """What was counted so far, as JSON can carry it."""
        return [self._rows, self._sums]

    def _count_on_from(self, counted: Sequence[Any]) -> None:
        """Count on from what some ranks, or nobody, counted together."""
        self._rows, self._sums = _added(counted)

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """All ranks' tallies as numbers, without means of means: "loss", each metric, "num_samples"."""
        rows, sums = _added([json.loads(part) for part in tallies])
        means = {name: total / rows if rows else float("nan") for name, total in sums.items()}
        return {"loss": float("nan"), **means, "num_samples": rows}

    def running_loss(self) -> float:
        """This rank's mean loss since tallies were last taken; cheap, for progress; NaN before any row."""
        return self._sums.get("loss", 0.0) / self._rows if self._rows else float("nan")

    def running_metrics(self) -> dict[str, float]:
        """Those metrics since tallies were last taken that are cheap to tell; for progress."""
        return {name: total / self._rows for name, total in self._sums.items() if name != "loss"}

    def loss_sums(self) -> tuple[float, float]:
        """This rank's summed loss and its weight since tallies were last taken; the quotient is the mean."""
        return self._sums.get("loss", 0.0), self._rows

    # A replica as bytes: loading them executes no code. Between epochs `state` of any rank is enough. In the
    # middle of one each rank has a `local_state` besides, to be loaded after `join` and `begin_epoch`.

    def state(self) -> bytes:
        """Weights, optimizer, schedule, randomness, epoch and step."""
        return b"".join(self.freeze()())

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of what `state` has, made now; the function makes the bytes later, on any thread."""
        fields, variables = {"epoch": self.epoch, "step": self.step}, self.variables()
        return lambda: packed(fields, variables)

    def wait_for_copy(self) -> None:
        """Wait until what was frozen is copied, before anybody but the replica itself changes weights."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; with `weights_only_model` only the model is taken from it.

        Raises:
            ConfigError: It is the state of another model or optimizer.
        """
        fields, groups = unpacked(data)
        known = {name: array for arrays in groups.values() for name, array in arrays.items()}
        wanted = self.variables(*_MODEL)
        for names in wanted.values():
            if missing := [name for name in names if name not in known]:
                raise ConfigError(
                    f"this state has no variable {missing[0]!r}; it has {sorted(known)[:8]}. They are not of"
                    " the same model."
                )
        if weights_only_model:
            groups = {group: {name: known[name] for name in names} for group, names in wanted.items()}
        self.assign(groups)
        if not weights_only_model:
            self.epoch, self.step = fields["epoch"], fields["step"]

    def expected_bytes(self) -> int:
        """How large `state` will be once it was trained, as far as that shows before."""
        return len(self.state())

    def local_state(self) -> bytes:
        """What this rank alone has within an epoch: randomness, tallies so far, buffers; counting goes on."""
        fields = {"own": own_states(), "tallies": self._counted(), "rows": self.epoch_rows}
        return b"".join(packed(fields, {"buffers": self._buffers()}))

    def load_local_state(self, data: bytes) -> None:
        """Go on from `local_state` of the same rank, in the epoch that has just begun."""
        fields, groups = unpacked(data)
        restore_own(fields["own"])
        self._count_on_from([fields["tallies"]])
        self.epoch_rows = fields["rows"]
        self.assign(groups)

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The same where other ranks were there: `states` are theirs, `size` is how many ranks there are now.

        Tallies of all count once, buffers are merged, and randomness begins anew.
        """
        parts = [unpacked(data) for data in states]
        rows = [fields["rows"] for fields, _ in parts]
        buffers = [groups["buffers"] for _, groups in parts]
        self.assign({"buffers": merge_parts(buffers, rows, self._means_of_variances())})
        self.epoch_rows = sum(rows) // size
        if self.rank == 0:
            self._count_on_from([fields["tallies"] for fields, _ in parts])
        seed_own(self.seed, self.epoch, self.rank, self.step)

    def weights(self) -> bytes:
        """The model's weights alone, as `load` reads them out of a file."""
        return self.state()

    def load_weights(self, data: bytes) -> None:
        self.load_state(data, weights_only_model=True)

    def save(self, path: str) -> None:
        """Write the model in the framework's own format."""
        Path(path).write_bytes(self.weights())

    def load(self, path: str) -> None:
        """Take the weights out of a file that `save`, or the framework itself, wrote."""
        self.load_weights(Path(path).read_bytes())


def packed(fields: Mapping[str, Any], variables: Variables) -> list[Buffer]:
    """The pieces that `unpacked` reads when they are joined."""
    named = [(name, array, group) for group, arrays in variables.items() for name, array in arrays.items()]
    described = [(name, array.dtype.name, list(array.shape), group) for name, array, group in named]
    head = json.dumps({**fields, "groups": list(variables), "variables": described}).encode()
    return pack(head, [_raw(array) for _, array, _ in named])


def unpacked(data: bytes) -> tuple[dict[str, Any], Variables]:
    """The fields and the variables; what was written before there were groups is in that of parameters."""
    head, buffers = unpack(data)
    fields = json.loads(head)
    groups: Variables = {group: {} for group in fields.get("groups", ())}
    for (name, dtype, shape, *group), buffer in zip(fields["variables"], buffers, strict=True):
        array = np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
        groups.setdefault(group[0] if group else "parameters", {})[name] = array
    return fields, groups


def _raw(array: Array) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def with_config(spec: Any, config: Mapping[str, Any]) -> Any:
    """A spec with these entries of its config, which may be a field of it or one of its options.

    Raises:
        ConfigError: It has no config.
    """
    if not config:
        return spec
    if is_dataclass(spec) and not isinstance(spec, type) and hasattr(spec, "config"):
        return replace(spec, config={**spec.config, **config})
    if isinstance(spec, Mapping) and isinstance(spec.get("config"), Mapping):
        return {**spec, "config": {**spec["config"], **config}}
    raise ConfigError(f"config={dict(config)!r}: models of this framework have no config.")


def _added(tallies: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    names = dict.fromkeys(name for _, sums in tallies for name in sums)
    return sum((rows for rows, _ in tallies), 0.0), {
        name: sum(sums.get(name, 0.0) for _, sums in tallies) for name in names
    }
