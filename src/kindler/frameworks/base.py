"""The framework contract: one class, a replica of the user's model in one process; rows: `registry.py`.

A framework implements `make_spec`, `variables`, `assign`, `gradients`, `apply`, `eval_step`, `predict` and
`learning_rate`; states as bytes, tallies, merged buffers and resuming follow from them. It overrides what it
can do faster or what only it can do (exports, row weights), which its row declares: defaults refuse.
"""

from __future__ import annotations

import hashlib
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
    """Base class of all replicas; subclasses take the same options.

    A framework writes `make_spec`, `variables`, `assign`, `gradients`, `apply`, `eval_step` and `predict`.
    It says in `facts` and `complaints` what is true of its models. Everything else has a default, which a
    framework replaces to be faster or to do more.

    All ranks make the same calls in the same order. In one process `train_step` equals `gradients` followed
    by `apply`.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        epoch_rows: Rows that this rank has trained on in this epoch.
        device: Where it computes.
        model: The model as callbacks see it.
        optimizer: The optimizer as callbacks see it; None if there is none.
        before_exchange: The loop's; a replica that `regroups` calls it in each step when `snapshot` is that
            of the step's end, and before the last contribution that other ranks need to complete it.
        divisible: Whether several parameter servers can share its parameters: `apply` accepts None for a
            parameter to leave alone, and `join_parts` exists.
        takes_read_only: Whether `predict` accepts read-only arrays as they are.
        output_names: The model's names for the outputs it returned last; None if they have none.
        mode: How it runs its steps, if it had a choice.

    Args:
        spec: The result of `make_spec`.
        device: "auto", "cpu", "cuda" (one GPU per rank) or "cuda:0".
        rank: This rank; all randomness except the initial weights depends on it.
        local_rank: Its number on its host, which selects the GPU.
        seed: The base of all seeds.
        threads: Compute threads; None leaves the process as it is.
        feature_names: Names of the features.
        label_names: Names of the labels.
        label_shapes: The shape of one row of each label in the first batch, if shapes may differ between
            batches; otherwise None.
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
        self.before_exchange: Callable[[], None] = lambda: None
        self._collective: Collective | None = None
        self._before: dict[str, Array] = {}
        self._sums: dict[str, float] = {}
        self._rows = 0.0
        seed_own(seed)

    # What the user gave.

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        """Check the user's arguments and return them in any form the framework likes.

        Raises:
            ConfigError: They cannot work; lists every problem.
        """
        return options

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """Return the spec as bytes, for workers and files."""
        return pickle_for_workers(spec)

    @classmethod
    def loads(cls, data: bytes) -> Any:
        return cloudpickle.loads(data)

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> Any:
        """Make a replica of a spec that `dumps` packed."""
        return cls(cls.loads(spec), **options)

    @classmethod
    def facts(cls, spec: Any) -> Facts:
        """Return what the driver must know about the spec."""
        return Facts()

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        """Return the reasons, as far as the driver knows, why the spec is unfit for a use.

        `value` is the data for "data"; for "division" it is what the user says the optimizer's work can be
        divided into: "elements", "parameters" or None.
        """
        if use == "parts" and not cls.divisible:
            return ["the parameters of this framework's models cannot be divided."]
        if use == "division":
            complaint = "only the optimizer of a PyTorch model can be divided between workers."
            return [f"{complaint}\nHint: strategy='allreduce' has the same result."]
        return []

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        """Return a private copy of the spec with these config entries and, unless None, this learning rate.

        Raises:
            ConfigError: The spec has no place for them.
        """
        if learning_rate is not None:
            raise ConfigError(
                "the learning rate of this model cannot be set from outside.\n"
                "Hint: read it from the config in a creator, and pass config={...}."
            )
        return with_config(spec, config)

    @classmethod
    def scoring_model(
        cls, spec: Any, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        """Return the current model for processes that only score with it.

        Override to leave out what only training needs.

        Args:
            spec: The spec.
            live: The model in this process, if one was made; the user may have changed it.
            state: Returns the trained state; empty if there is none.
            before: The previous result, returned again if nothing changed.
        """
        return ScoringModel.of(cls.dumps(spec), state(), before)

    # Predicting.

    @property
    def on_gpu(self) -> bool:
        return False

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """Return the outputs for these rows, one array per output, rows first."""
        raise NotImplementedError

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        """Yield the result of `predict` for each batch, in order.

        May read up to six batches ahead of the first result.
        """
        for batch in batches:
            outputs = self.predict(batch)
            yield Scored(len(batch[0]), outputs, self.output_names)

    def set_precision(self, precision: str) -> None:
        """Compute in one of the precisions in the framework's registry row from now on."""
        raise ConfigError(f"models of this framework cannot compute in {precision}.")

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Write the model as "onnx" or "openvino" (an .xml and a .bin file), if the registry row allows it.

        `features` holds a few rows of each input; `predict` has been called with them.
        """
        raise ConfigError(f"models of this framework cannot be written as {form}.")

    def trained_model(self) -> Any:
        """Return the model, ready to predict: the user's own instance if one was passed."""
        return self.model

    def stored_model(self) -> Any:
        """Return what `kindler.models` stores: the model, with anything that belongs to it."""
        return self.trained_model()

    # Training.

    def expect(self, features: Sequence[Array]) -> None:
        """Announce the input shapes with arrays of no rows. Called before states are loaded."""

    def restore_requires_grad(self) -> None:
        """Take settings besides weights (such as what is frozen) from the user's model, not from a state."""

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        """Keep these columns on the model's device, if that pays; each function selects rows of one."""
        return None

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        """Multiply the losses of rows by weights; supported if the registry row says `row_weights`.

        Args:
            classes: Weights by class number, for training.
            column: Whether the last label column of every batch is a weight.
        """
        raise ConfigError(f"{type(self).__name__} does not support row weights.")

    def watch_losses(self, watch: LossGuard) -> None:
        """Report the loss of every training step to `watch`; supported if the registry row says so.

        If it `skips`, a step whose loss is not finite on some rank leaves weights, optimizer and buffers
        unchanged on all ranks; only `step` counts it.
        """

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state and merge buffers through `collective` from now on. Call at most once."""
        self._collective = collective
        if collective.size > 1:
            self.load_state(share_bytes(collective, self.state() if collective.rank == 0 else b""))

    @property
    def _joined(self) -> Collective:
        assert self._collective is not None, "join comes first"
        return self._collective

    @property
    def _others(self) -> Collective | None:
        """None if this is the only rank."""
        return self._collective if self._collective is not None and self._collective.size > 1 else None

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """Let `train_step` exchange gradients itself from now on; None if the framework cannot.

        Args:
            worker: This worker; every rank makes this call.
            settings: Time limits, and whether workers of one machine exchange through shared memory.
            strategy: "allreduce"; "zero1", which divides the optimizer between ranks; or "fsdp", which
                also divides the parameters.
            options: Options of that strategy.
        """
        return None

    @property
    def regroups(self) -> bool:
        """Whether it can go on after the loss of a rank: it has `snapshot`, and calls `before_exchange`."""
        return False

    def keep_in(self, file: int, former: str = "") -> None:
        """Keep in this file, until the run ends, what this rank alone has of the optimizer's state.

        Args:
            file: A file that outlives the process, from the first `fuse` on.
            former: The path of the one in which it is now, if this process takes the place of another.
        """

    def go_back(self, step: int) -> bool:
        """Undo what has been done of the step after `step`; False if that is not possible."""
        return True

    def is_kept(self, file: int | None, step: int) -> bool:
        """Whether what another rank keeps in its file, if there is one, is enough to go on after `step`."""
        return True

    def snapshot(self) -> bytes | None:
        """Return what `local_state` does, fast, for processes of the same run only; None if it cannot."""
        raise NotImplementedError

    def restore(self, snapshot: bytes) -> None:
        """Go back to a snapshot of this epoch, of this rank's; counts, buffers and randomness are as then."""
        raise NotImplementedError

    def rejoin(self, collective: Collective, state: bytes = b"") -> None:
        """Use a new collective, when the process of a rank was replaced.

        Args:
            collective: Connects all ranks; `fuse` comes next.
            state: What to continue from; empty if this rank has it.
        """
        self._collective = collective
        if state:
            self.load_state(state)

    @property
    def buffers_before(self) -> dict[str, Array]:
        """The buffers at the beginning of the epoch."""
        return self._before

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch. Randomness depends on its number, so that a resumed epoch is the same."""
        self.epoch, self.epoch_rows = epoch, 0
        self._seed(self.seed, epoch, self.rank)
        if self._others is not None:
            self._before = self._buffers()

    def _seed(self, *numbers: int) -> None:
        """Seed everything that is random in the process."""
        seed_own(*numbers)

    def train_step(self, batch: Batch) -> None:
        """Make a whole optimizer step on the mean over the rows."""
        if batch.global_rows:
            self.apply(self.gradients(batch).arrays)

    def gradients(self, batch: Batch) -> Gradients:
        """Return and count the gradients of this rank's rows; no parameter moves."""
        raise ConfigError(
            "this strategy asks each worker for its gradients, but a train_step or LightningModule updates "
            "the parameters itself.\nHint: strategy='allreduce'."
        )

    def apply(self, gradients: Sequence[Array]) -> None:
        """Make one optimizer step with these gradients, in the order of the parameters; increments `step`."""
        raise NotImplementedError

    def pass_step(self) -> None:
        """Advance per-step schedules in a step for which this rank has no rows."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Advance per-epoch schedules; `logs` has the epoch's metrics."""

    def eval_step(self, batch: Batch) -> None:
        """Count the loss and metrics of a batch without training."""
        raise NotImplementedError

    def learning_rate(self) -> float:
        """Return the learning rate of the next step (of the first parameter group)."""
        return float("nan")

    def rates(self) -> list[float]:
        """Return the learning rates that can be set, one per parameter group; empty if none can."""
        return []

    def set_rates(self, rates: Sequence[float]) -> None:
        """Do nothing: there are none."""

    # Parameters as arrays.

    def variables(self, *groups: str) -> Variables:
        """Return copies of everything the next step depends on, or of these groups."""
        raise NotImplementedError

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        """Overwrite the named variables."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of the trained parameters."""
        return list(self.variables("parameters")["parameters"])

    def read(self) -> list[Array]:
        """Return copies of the trained parameters, in the order of `names`."""
        return list(self.variables("parameters")["parameters"].values())

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters, in the order of `names`."""
        self.assign({"parameters": dict(zip(self.names(), arrays, strict=True))})

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters into arrays of the same shapes and dtypes."""
        for into, array in zip(arrays, self.read(), strict=True):
            np.copyto(into, array)

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """Join the states of servers that each owned the parameters at these positions; `divisible` only."""
        raise NotImplementedError

    # Buffers.

    def _buffers(self) -> dict[str, Array]:
        return self.variables("buffers").get("buffers", {})

    def _means_of_variances(self) -> dict[str, str]:
        """Maps the names of variances to those of their means."""
        pairs = ((name, mean_by_name(name)) for name in self._buffers())
        return {name: mean for name, mean in pairs if mean is not None}

    def merge_buffers(self) -> None:
        """Make buffers the same on all ranks, before the model is evaluated.

        Buffers that no rank has changed (frozen weights, tables) are left alone: a mean would round them.
        """
        own = self._buffers() if self._others is not None else {}
        if self._others is None or not own:
            return
        [flags] = self._others.sum([np.array(self._changes(own), np.int64)])
        moved = {name: own[name] for name, flag in zip(own, flags, strict=True) if flag}
        merged = merge_over_ranks(self._others, moved, self.epoch_rows, self._means_of_variances())
        self.assign({"buffers": merged})

    def _changes(self, buffers: Mapping[str, Array]) -> list[bool]:
        """Which buffers this rank has changed in this epoch."""
        before = self._before
        # Bytes, so that NaN is equal to itself.
        return [n not in before or before[n].tobytes() != array.tobytes() for n, array in buffers.items()]

    # What is counted.

    def count(self, rows: float, **means: float) -> None:
        """Add means over this many rows: the loss and metrics."""
        self._rows += rows
        for name, mean in means.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(mean) * rows

    def take_tallies(self) -> bytes:
        """Return this rank's sums and metric states as bytes, and reset them."""
        tallies = json.dumps(self._counted()).encode()
        self._count_on_from([])
        return tallies

    def _counted(self) -> Any:
        """Return the counts so far, JSON-serializable."""
        return [self._rows, self._sums]

    def _count_on_from(self, counted: Sequence[Any]) -> None:
        """Replace the counts by the sum of these; empty resets them."""
        self._rows, self._sums = _added(counted)

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """Merge all ranks' tallies, without means of means: "loss", each metric, "num_samples"."""
        rows, sums = _added([json.loads(part) for part in tallies])
        means = {name: total / rows if rows else float("nan") for name, total in sums.items()}
        return {"loss": float("nan"), **means, "num_samples": rows}

    def running_loss(self) -> float:
        """Return this rank's mean loss since the last `take_tallies`, for progress; NaN before any row."""
        loss, weight = self.loss_sums()
        return loss / weight if weight else float("nan")

    def running_metrics(self) -> dict[str, float]:
        """Return the metrics since the last `take_tallies` that are cheap to compute; for progress."""
        return {name: total / self._rows for name, total in self._sums.items() if name != "loss"}

    def loss_sums(self) -> tuple[float, float]:
        """Return this rank's summed loss and its weight since the last `take_tallies`, for a mean."""
        return self._sums.get("loss", 0.0), self._rows

    # A replica as bytes: loading them executes no code. Between epochs `state` of any rank is enough. In the
    # middle of one each rank has a `local_state` besides, to be loaded after `join` and `begin_epoch`.

    def state(self) -> bytes:
        """Return weights, optimizer, schedule, randomness, epoch and step."""
        return b"".join(self.freeze()())

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """Copy what `state` holds now; the returned function makes the bytes later, on any thread."""
        fields, variables = {"epoch": self.epoch, "step": self.step}, self.variables()
        return lambda: packed(fields, variables)

    def wait_for_copy(self) -> None:
        """Wait until a frozen state is copied; needed before anyone but the replica changes weights."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Restore `state`; with `weights_only_model` only the model.

        Raises:
            ConfigError: It is the state of another model or optimizer.
        """
        fields, groups = unpacked(data)
        known = {name: array for arrays in groups.values() for name, array in arrays.items()}
        wanted = self.variables(*_MODEL)
        for names in wanted.values():
            if missing := [name for name in names if name not in known]:
                raise ConfigError(
                    f"this state has no variable {missing[0]!r}; it has {sorted(known)[:8]}. They belong to "
                    "different models."
                )
        if weights_only_model:
            groups = {group: {name: known[name] for name in names} for group, names in wanted.items()}
        self.assign(groups)
        if not weights_only_model:
            self.epoch, self.step = fields["epoch"], fields["step"]

    def expected_bytes(self) -> int:
        """Estimate the size of `state` after training."""
        return len(self.state())

    def local_state(self) -> bytes:
        """Return what only this rank has within an epoch: randomness, tallies, buffers. Counting goes on."""
        fields = {"own": own_states(), "tallies": self._counted(), "rows": self.epoch_rows}
        return self._packed_local(fields)

    def _packed_local(self, fields: dict[str, Any]) -> bytes:
        return b"".join(packed(fields, {"buffers": self._buffers()}))

    def _unpacked_local(self, data: bytes) -> tuple[dict[str, Any], Variables]:
        return unpacked(data)

    def load_local_state(self, data: bytes) -> None:
        """Restore `local_state` of the same rank, in the epoch that has just begun."""
        fields, groups = self._unpacked_local(data)
        if "own" in fields:
            restore_own(fields["own"])
        self._count_on_from([fields["tallies"]])
        self.epoch_rows = fields["rows"]
        self.assign(groups)

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """Restore from the local states of a different set of ranks; `size` is the number of ranks now.

        Tallies are counted once, buffers are merged, and randomness is seeded afresh.
        """
        parts = [self._unpacked_local(data) for data in states]
        rows = [fields["rows"] for fields, _ in parts]
        buffers = [groups["buffers"] for _, groups in parts]
        self.assign({"buffers": merge_parts(buffers, rows, self._means_of_variances())})
        self.epoch_rows = sum(rows) // size
        if self.rank == 0:
            self._count_on_from([fields["tallies"] for fields, _ in parts])
        self._seed(self.seed, self.epoch, self.rank, self.step)

    def weights(self) -> bytes:
        """Return only the model's weights, in the form that `load` reads from a file."""
        return self.state()

    def digests(self) -> dict[str, str]:
        """Return a hash of each of the model's variables, by name: equal ones are equal to the bit."""
        groups = self.variables(*_MODEL)
        return {
            name if group == "parameters" else f"{name} ({group})": digest(array)
            for group, arrays in groups.items()
            for name, array in arrays.items()
        }

    def load_weights(self, data: bytes) -> None:
        self.load_state(data, weights_only_model=True)

    def save(self, path: str) -> None:
        """Write the model in the framework's own format."""
        Path(path).write_bytes(self.weights())

    def load(self, path: str) -> None:
        """Read the weights from a file written by `save` or by the framework itself."""
        self.load_weights(Path(path).read_bytes())


def digest(array: Array) -> str:
    found = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:32]


def packed(fields: Mapping[str, Any], variables: Variables) -> list[Buffer]:
    """Pieces for `unpacked`."""
    named = [(name, array, group) for group, arrays in variables.items() for name, array in arrays.items()]
    described = [(name, array.dtype.name, list(array.shape), group) for name, array, group in named]
    head = json.dumps({**fields, "groups": list(variables), "variables": described}).encode()
    return pack(head, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array, _ in named])


def unpacked(data: bytes) -> tuple[dict[str, Any], Variables]:
    """In files older than groups, all variables count as parameters."""
    head, buffers = unpack(data)
    fields = json.loads(head)
    groups: Variables = {group: {} for group in fields.get("groups", ())}
    for (name, dtype, shape, *group), buffer in zip(fields["variables"], buffers, strict=True):
        array = np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
        groups.setdefault(group[0] if group else "parameters", {})[name] = array
    return fields, groups


def with_config(spec: Any, config: Mapping[str, Any]) -> Any:
    """The config is a field of the spec or one of its options; raises ConfigError without one."""
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
