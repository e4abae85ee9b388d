"""A replica that does by default what most frameworks need nothing special for.

A subclass says what its parameters are, what gradients rows give, and how the optimizer and the model use
them; `gradients` and `eval_step` report what they saw with `count`. The rest is overridden where a framework
needs it: see `contract.py` for what each method promises.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np

from kindler.collective import Array, Collective, Gradients, share_bytes
from kindler.errors import ConfigError
from kindler.frameworks.contract import Batch, LossWatch, Scored
from kindler.frameworks.pickling import travelling
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.scoring_model import ScoringModel
from kindler.frameworks.state_format import Buffer

_EPOCH, _STEP = "kindler.epoch", "kindler.step"


class BaseReplica:
    """See `contract.py` for the arguments and for what the methods promise."""

    fuses = ""
    divisible = False
    model: Any = None
    optimizer: Any = None
    takes_read_only = False
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
        self.epoch = self.step = 0
        self._sums: dict[str, float] = {}
        self._rows = 0.0
        seed_own(seed)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows."""
        raise NotImplementedError

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        """One batch after the other."""
        for batch in batches:
            outputs = self.predict(batch)
            yield Scored(len(batch[0]), outputs, self.output_names)

    def set_precision(self, precision: str) -> None:
        """Needed where the framework's row has several."""
        raise ConfigError(f"models of this framework cannot be told to compute in {precision}.")

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Where it computes on a GPU."""
        return self.on_gpu

    @classmethod
    def may_use_gpus(cls, spec: Any) -> bool:
        """Whether the framework that is installed here could compute on a GPU; asks no device."""
        return False

    @classmethod
    def wants_process_group(cls, spec: Any) -> bool:
        """Whether workers join `torch.distributed` before they make the model."""
        return False

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> Any:
        """A replica of a packed spec."""
        return cls(cls.loads(spec), **options)

    @classmethod
    def scoring_model(
        cls, spec: Any, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        """All that training has; frameworks that can tell it apart leave out what only training needs."""
        return ScoringModel.of(cls.dumps(spec), state(), before)

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        """The options themselves."""
        return options

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """A pickle, with the code that the user's own modules hold."""
        return travelling(spec)

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """What `dumps` packed."""
        return cloudpickle.loads(data)

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        """The spec, which nobody else holds, with these entries of its config and this learning rate.

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
    def has_instance(cls, spec: Any) -> bool:
        """The user holds nothing that training changes."""
        return False

    @classmethod
    def against_row_weights(cls, spec: Any) -> list[str]:
        """Nothing is known against them."""
        return []

    def watch_losses(self, watch: LossWatch) -> None:
        """Nobody is told of losses."""

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        """Only for frameworks whose row says that they take weights."""
        raise ConfigError(f"{type(self).__name__} takes no weights of rows.")

    @classmethod
    def lacking(cls, spec: Any, *names: str) -> list[str]:
        """Nothing is missing."""
        return []

    @classmethod
    def needs_labels(cls, spec: Any) -> bool | Literal["found"]:
        """Labels are looked for where no columns are named."""
        return True

    @classmethod
    def against_data(cls, spec: Any, data: Any) -> list[str]:
        """Data shows only on workers whether it fits."""
        return []

    @classmethod
    def against_several(cls, spec: Any) -> list[str]:
        """Several workers can train it."""
        return []

    @classmethod
    def against_server(cls, spec: Any) -> list[str]:
        """The gradients of a step can be asked for."""
        return []

    @classmethod
    def against_parts(cls, spec: Any) -> list[str]:
        """Nobody has said how to divide it."""
        return [] if cls.divisible else ["the parameters of this framework's models cannot be divided."]

    @classmethod
    def against_division(cls, spec: Any, asked: str | None) -> list[str]:
        """Nobody has said how to divide the optimizer."""
        complaint = "only the optimizer of a PyTorch model can be divided between workers."
        return [f"{complaint}\nHint: sync='allreduce' has the same result."]

    @classmethod
    def environment(cls, spec: Any) -> tuple[tuple[str, str], ...]:
        """Nothing has to be set before the framework is imported."""
        return ()

    @classmethod
    def as_data(cls, spec: Any, data: Any) -> Any:
        """Data is what Kindler takes for every framework."""
        return data

    def expect(self, features: Sequence[Array]) -> None:
        """The model knows the shapes of its inputs."""

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Needed where the framework's row says that it can."""
        raise ConfigError(f"models of this framework cannot be written as {form}.")

    def names(self) -> list[str]:
        """Parameters."""
        raise NotImplementedError

    def read(self) -> list[Array]:
        """Parameters."""
        raise NotImplementedError

    def write(self, arrays: Sequence[Array]) -> None:
        """Parameters."""
        raise NotImplementedError

    def gradients(self, batch: Batch) -> Gradients:
        """Needed to train."""
        raise NotImplementedError

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copies of copies."""
        for into, array in zip(arrays, self.read(), strict=True):
            np.copyto(into, array)

    def apply(self, gradients: Sequence[Array]) -> None:
        """Needed to train; counts `step`."""
        raise NotImplementedError

    def rates(self) -> list[float]:
        """None can be set."""
        return []

    def set_rates(self, rates: Sequence[float]) -> None:
        """There are none."""

    def trained_model(self) -> Any:
        """What callbacks see."""
        return self.model

    def stored_model(self) -> Any:
        """What is written to files when the model is stored."""
        return self.trained_model()

    def as_given(self) -> None:
        """Nothing besides weights belongs to the user."""

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        """Rows stay where they are."""
        return None

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state."""
        if collective.size > 1:
            self.load_state(share_bytes(collective, self.state() if collective.rank == 0 else b""))

    def fuse(self, exchange: Any) -> None:
        """Only for frameworks that say what they fuse with."""
        raise ConfigError(f"{type(self).__name__} exchanges no gradients within its own step.")

    def divide(self, exchange: Any, asked: str | None, *, one_copy: bool = False) -> None:
        """Only for frameworks whose optimizer can move parts of the parameters."""
        raise ConfigError(f"the optimizer of {type(self).__name__} cannot be divided between workers.")

    def begin_epoch(self, epoch: int) -> None:
        """Seed Python and numpy by epoch and rank."""
        self.epoch = epoch
        seed_own(self.seed, epoch, self.rank)

    def train_step(self, batch: Batch) -> None:
        """The gradients of the rows there are, applied."""
        if batch.global_rows:
            self.apply(self.gradients(batch).arrays)

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """Needed where it is `divisible`."""
        raise NotImplementedError

    def merge_buffers(self) -> None:
        """Training changes parameters only."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """There is no schedule."""

    def learning_rate(self) -> float:
        """Not known."""
        return float("nan")

    def count(self, rows: float, **means: float) -> None:
        """Note means over so many rows: the loss, and metrics."""
        self._rows += rows
        for name, mean in means.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(mean) * rows

    def take_tallies(self) -> bytes:
        """Sums as JSON."""
        tallies = json.dumps([self._rows, self._sums]).encode()
        self._rows, self._sums = 0.0, {}
        return tallies

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """Sums of sums, divided once."""
        rows, sums = _added([json.loads(part) for part in tallies])
        means = {name: total / rows if rows else float("nan") for name, total in sums.items()}
        return {"loss": float("nan"), **means, "num_samples": rows}

    def running_loss(self) -> float:
        """The mean so far."""
        return self._sums.get("loss", 0.0) / self._rows if self._rows else float("nan")

    def running_metrics(self) -> dict[str, float]:
        """The means so far."""
        return {name: total / self._rows for name, total in self._sums.items() if name != "loss"}

    def loss_sums(self) -> tuple[float, float]:
        """The loss so far."""
        return self._sums.get("loss", 0.0), self._rows

    def variables(self) -> dict[str, Array]:
        """Everything that the next step depends on; by default the parameters."""
        return dict(zip(self.names(), self.read(), strict=True))

    def load_variables(self, variables: Mapping[str, Array]) -> None:
        """Go on from `variables`; optimizer and schedule may be missing, where only weights are loaded."""
        self.write([variables[name] for name in self.names()])

    def expected_bytes(self) -> int:
        """How large `state` will be once it was trained, as far as that shows before."""
        return len(self.state())

    def state(self) -> bytes:
        """`variables` as numpy's own format, which holds no pickles."""
        file = io.BytesIO()
        counts = {_EPOCH: np.array(self.epoch), _STEP: np.array(self.step)}
        np.savez(file, allow_pickle=False, **self.variables(), **counts)
        return file.getvalue()

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """What `state` wrote."""
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        epoch, step = int(found.pop(_EPOCH)), int(found.pop(_STEP))
        self.load_variables(found)
        if not weights_only_model:
            self.epoch, self.step = epoch, step

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """The state is small: it is made at once."""
        data = self.state()
        return lambda: [data]

    def settle(self) -> None:
        """Nothing is copied later."""

    def local_state(self) -> bytes:
        """Randomness and tallies."""
        return json.dumps({"own": own_states(), "tallies": [self._rows, self._sums]}).encode()

    def load_local_state(self, data: bytes) -> None:
        """Randomness and tallies of this rank."""
        fields = json.loads(data)
        restore_own(fields["own"])
        self._rows, self._sums = fields["tallies"]

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The first rank counts for all that were there."""
        if self.rank == 0:
            self._rows, self._sums = _added([json.loads(data)["tallies"] for data in states])
        seed_own(self.seed, self.epoch, self.rank, self.step)

    def weights(self) -> bytes:
        """The state, of which `load_weights` takes the weights."""
        return self.state()

    def load_weights(self, data: bytes) -> None:
        """The model's part of a state."""
        self.load_state(data, weights_only_model=True)

    def save(self, path: str) -> None:
        """A file that `numpy.load` reads."""
        Path(path).write_bytes(self.weights())

    def load(self, path: str) -> None:
        """A file that `save` wrote."""
        self.load_weights(Path(path).read_bytes())


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
    return sum(rows for rows, _ in tallies), {
        name: sum(sums.get(name, 0.0) for _, sums in tallies) for name in names
    }
