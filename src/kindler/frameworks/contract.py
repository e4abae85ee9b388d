"""What a framework is: the contracts that its one class keeps, and that everything else relies on.

A replica is the user's model in one process. On the driver it is a `DriverModel`, where rows are scored a
`Scorer`, in training a `Stepper`, or a `Fitter` where the framework has a training loop of its own. Its row
in `registry.py` says which of these it keeps; `base.py` has defaults for most of it. No framework is imported
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kindler.collective import Array, Collective, Gradients
from kindler.frameworks.scoring_model import ScoringModel
from kindler.frameworks.state_format import Buffer

__all__ = [
    "Array",
    "Batch",
    "DriverModel",
    "Feed",
    "Fitter",
    "Keeps",
    "LossWatch",
    "Scored",
    "Scorer",
    "Stepper",
    "Tallies",
    "Watch",
]


class Batch(Protocol):
    """The rows of one step: this rank's arrays, and how many rows all ranks have in this step."""

    @property
    def features(self) -> tuple[Array, ...]:
        """One array a feature column, rows first."""

    @property
    def labels(self) -> tuple[Array, ...]:
        """One array a label column, rows first."""

    @property
    def rows(self) -> int:
        """Rows of this rank; 0 when it only takes part."""

    @property
    def global_rows(self) -> int:
        """Rows of all ranks together."""

    @property
    def where(self) -> Callable[[int], int | str] | None:
        """Names a row of this rank's by where it stood in the data; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The outputs of a batch.

    Attributes:
        rows: How many rows it had.
        outputs: One array an output, rows first.
        names: What the model called them; None where they have no names.
    """

    rows: int
    outputs: list[Array]
    names: tuple[str, ...] | None = None


class Scorer(Protocol):
    """A model that predicts.

    Attributes:
        takes_read_only: Whether `predict` takes arrays that must not be written to, as they are.
        output_names: What the model called the outputs that it returned last; None where they have no names.
    """

    takes_read_only: bool
    output_names: tuple[str, ...] | None

    @classmethod
    def from_bytes(
        cls,
        spec: bytes,
        *,
        device: str,
        seed: int = 0,
        rank: int = 0,
        local_rank: int = 0,
        threads: int | None = None,
        feature_names: tuple[str, ...] = (),
        label_names: tuple[str, ...] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """A replica of what `dumps` packed.

        Args:
            spec: The packed spec.
            device: "auto", "cpu", "cuda" (one GPU a rank) or "cuda:0".
            seed: What the random numbers of creators start from.
            rank: This rank; randomness other than that of the first weights differs by it.
            local_rank: Its number on its host, which chooses the GPU.
            threads: Compute threads; None leaves the process as it is.
            feature_names: Names of the features.
            label_names: Names of the labels.
            label_shapes: Where rows of one batch may have another shape than those of another: the shape of
                a row of each label in the first batch. Otherwise None.
        """

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; with `weights_only_model` only the model is taken from it."""

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The model's outputs for these rows, one array an output, rows first."""

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        """What `predict` gives for each of the batches, in their order.

        A few may be under way at a time: it may ask for up to six more before it gives back the first.
        """

    def set_precision(self, precision: str) -> None:
        """Compute in one of the precisions of the framework's row from now on."""

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Write the model as "onnx" or "openvino" (an .xml file and a .bin file); its row says if it can.

        Args:
            form: The format.
            path: The file.
            features: A few rows of each input, of which `predict` was called before.

        Raises:
            ConfigError: The model cannot be converted.
        """


class DriverModel(Protocol):
    """The model in the user's own process, made as `cls(spec, device="cpu", seed=...)`.

    A spec is what the user gave, in whatever form the framework likes.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
    """

    epoch: int
    step: int

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        """A spec of the arguments of `Estimator.from_framework`.

        Raises:
            ConfigError: They cannot work; says all that is wrong with them.
        """

    @classmethod
    def may_use_gpus(cls, spec: Any) -> bool:
        """Whether the framework that is installed here could compute on a GPU; asks no device."""

    @classmethod
    def wants_process_group(cls, spec: Any) -> bool:
        """Whether workers join `torch.distributed` before they make the model."""

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """The spec as bytes, for workers and files."""

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """The spec out of those bytes, or out of those of a scoring model."""

    @classmethod
    def scoring_model(
        cls, spec: Any, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        """The model as it is now, for processes that only score with it.

        Args:
            spec: What the user gave.
            live: The model of this class in this process, if it was made. The user may have changed it.
            state: Gives the trained state; empty if there is none.
            before: What this gave last; it is given again where nothing has changed.
        """

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        """A spec that `loads` returned, with these entries of its config and this rate, unless it is None.

        Raises:
            ConfigError: It has no place for them.
        """

    @classmethod
    def has_instance(cls, spec: Any) -> bool:
        """Whether the user holds something that training changes, rather than a way to make it."""

    @classmethod
    def lacking(cls, spec: Any, *names: str) -> list[str]:
        """What the spec lacks of "optimizer" and "loss", as complaints."""

    @classmethod
    def needs_labels(cls, spec: Any) -> bool | Literal["found"]:
        """Whether training and judging it takes labels; "found": where there are some."""

    @classmethod
    def as_data(cls, spec: Any, data: Any) -> Any:
        """What `fit` and `evaluate` were given, in a form that Kindler takes, if it has a form of its own."""

    @classmethod
    def against_data(cls, spec: Any, data: Any) -> list[str]:
        """What speaks against this data, as far as it is known on the driver, as complaints."""

    @classmethod
    def against_row_weights(cls, spec: Any) -> list[str]:
        """Why the losses of its rows cannot be weighed, as far as it is known on the driver."""

    @classmethod
    def against_several(cls, spec: Any) -> list[str]:
        """What speaks against training by several workers, as far as it is known on the driver."""

    @classmethod
    def against_server(cls, spec: Any) -> list[str]:
        """Why a parameter server cannot apply this model's updates, as far as it is known on the driver."""

    @classmethod
    def against_parts(cls, spec: Any) -> list[str]:
        """Why several parameter servers cannot share the parameters; empty if they can."""

    @classmethod
    def against_division(cls, spec: Any, asked: str | None) -> list[str]:
        """Why workers cannot divide the optimizer's work, as far as it is known on the driver.

        `asked` is what the user says that it can be divided into: "elements", "parameters" or None.
        """

    @classmethod
    def environment(cls, spec: Any) -> tuple[tuple[str, str], ...]:
        """Variables that must be set in workers before the framework is imported."""

    def trained_model(self) -> Any:
        """The model itself, ready to predict; the user's own instance where one was given."""

    def stored_model(self) -> Any:
        """What a kind of models (`kindler.models`) writes: the model, or it with what belongs to it."""

    def save(self, path: str) -> None:
        """Write the model in the framework's own format."""

    def load(self, path: str) -> None:
        """Take the weights out of a file that `save`, or the framework itself, wrote."""

    def state(self) -> bytes:
        """Weights, optimizer, schedule, randomness, epoch and step; reading them executes no code."""


class LossWatch(Protocol):
    """Who looks at the losses of training steps; `train/loss_guard.py` does.

    Attributes:
        skips: Whether a step with a loss that is not finite is left out, on all ranks.
    """

    skips: bool

    def saw(self, step: int, loss: float, describe: Callable[[], tuple[Sequence[int | str], str]]) -> bool:
        """Look at a loss now; whether it is finite. `describe` gives the batch's first rows and an oddity."""

    def note(
        self,
        step: int,
        loss: Any,
        describe: Callable[[], tuple[Sequence[int | str], str]],
        values: Callable[[Sequence[Any]], Sequence[float]] | None = None,
    ) -> None:
        """Look at a loss soon, which is somewhere else; `values` brings several of them here."""

    def skip(self) -> None:
        """A step was left out."""


class Tallies(Protocol):
    """What a replica counted: sums and metric states, merged over ranks without means of means."""

    def take_tallies(self) -> bytes:
        """This rank's sums and metric states since they were last taken; counting starts anew."""

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """All ranks' tallies as numbers: "loss", each metric, "num_samples"."""

    def running_loss(self) -> float:
        """This rank's mean loss since tallies were last taken; cheap, for progress; NaN before any row."""

    def running_metrics(self) -> dict[str, float]:
        """Those metrics since tallies were last taken that are cheap to tell; for progress."""

    def loss_sums(self) -> tuple[float, float]:
        """This rank's summed loss and its weight since tallies were last taken; the quotient is the mean."""

    def learning_rate(self) -> float:
        """The rate of the next step (of the first parameter group)."""


class Keeps(Protocol):
    """A replica as bytes: everything that the next step depends on; loading it executes no code.

    Between epochs `state` of any rank is enough. In the middle of one each rank has a `local_state` besides,
    to be loaded after `join` and `begin_epoch`.
    """

    def state(self) -> bytes:
        """Weights, optimizer, schedule, randomness, epoch and step."""

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of what `state` has, made now; the function makes the bytes later, on any thread."""

    def settle(self) -> None:
        """Wait until what was frozen is copied, before anybody but the replica itself changes weights."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; with `weights_only_model` only the model is taken from it."""

    def expected_bytes(self) -> int:
        """How large `state` will be once it was trained, as far as that shows before."""

    def local_state(self) -> bytes:
        """What this rank alone has within an epoch: randomness, tallies so far, buffers; counting goes on."""

    def load_local_state(self, data: bytes) -> None:
        """Go on from `local_state` of the same rank, in the epoch that has just begun."""

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The same where other ranks were there: `states` are theirs, `size` is how many ranks there are now.

        Tallies of all count once, buffers are merged, and randomness begins anew.
        """

    def weights(self) -> bytes:
        """The model's weights alone, as `load` reads them out of a file."""

    def load_weights(self, data: bytes) -> None:
        """Take the weights of such bytes."""


class Stepper(Scorer, Tallies, Keeps, Protocol):
    """A replica that the training loop steps. Between ranks, all make the same calls in the same order.

    Its parameters have one form that any sync understands: names and numpy arrays. `gradients` and `apply`
    are together what `train_step` is in one process; a replica that `fuses` does it faster.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        device: Where it computes.
        model: What callbacks see as the model.
        optimizer: What they see as the optimizer; None where there is none.
        fuses: The library whose gradients `train_step` can exchange itself once `fuse` was called: "torch",
            or "" for none.
        divisible: Whether its parameters can be divided between several parameter servers: `apply` takes
            None, and there is `join_parts`.
        mode: How it makes its steps, where it was left a choice.
    """

    epoch: int
    step: int
    device: Any
    model: Any
    optimizer: Any
    fuses: str
    divisible: bool
    mode: str | None

    def as_given(self) -> None:
        """Take from the user's own model what it says besides weights (what is frozen), not from a state."""

    def expect(self, features: Sequence[Array]) -> None:
        """Inputs of these shapes will come; the arrays have no rows. Called before states are loaded."""

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        """Keep these columns where the model computes, if that pays; a function for each that takes rows."""

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; at most once. `merge_buffers` goes through this from now on."""

    def fuse(self, exchange: Any) -> None:
        """From now on let `train_step` exchange gradients itself; only where `fuses` says so."""

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        """Multiply the losses of rows by weights, where the row in the registry says `row_weights`.

        A framework with a loop of its own gets `class_weight` in `fit`, and knows of the column by `arrange`.

        Args:
            classes: Weights by class number, for training.
            column: Whether the last label column of every batch is a weight.
        """

    def watch_losses(self, watch: LossWatch) -> None:
        """Show `watch` the loss of every training step, where the row in the registry says so.

        Where it `skips`, a step with a loss that is not finite on some rank leaves weights, optimizer and
        buffers on all ranks as they were; only `step` counts it. A framework with a loop of its own is
        followed instead: see `keep_step`.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for the epoch of this number: randomness depends on it, so a resumed epoch is the same."""

    def train_step(self, batch: Batch) -> None:
        """A whole optimizer step on the mean over the rows: alone, or fused."""

    def names(self) -> list[str]:
        """What the trained parameters are called."""

    def read(self) -> list[Array]:
        """Copies of the trained parameters, in the order of `names`."""

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""

    def gradients(self, batch: Batch) -> Gradients:
        """What this rank's rows say; counts them, and moves no parameter."""

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters into these arrays, of their shapes and dtypes."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimizer with these gradients.

        Where `divisible`, a parameter that has None instead is left alone.
        """

    def rates(self) -> list[float]:
        """The optimizer's learning rates that may be set, one a group of parameters; empty where none may."""

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set them."""

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """One state out of those of servers that looked after the parameters of these places; `divisible`."""

    def merge_buffers(self) -> None:
        """Make what training changed besides parameters the same on all ranks, before it is judged."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Move per-epoch schedules; `logs` has the epoch's figures."""

    def eval_step(self, batch: Batch) -> None:
        """Judge a batch without learning from it."""


class Feed(Protocol):
    """Batches by number, counted from 0 within the epoch that runs."""

    def __len__(self) -> int: ...

    def batch(self, number: int) -> tuple[Sequence[Array], Sequence[Array]]:
        """Features and labels of one step; called from any thread."""


class Watch(Protocol):
    """Who follows a framework's own loop; epochs and steps are counted from 0, as the framework does."""

    def train_begins(self) -> None:
        """After the callbacks of that name."""

    def epoch_begins(self, epoch: int) -> None:
        """Before the callbacks of that name."""

    def step_begins(self) -> None:
        """Before the callbacks of that name."""

    def step_ends(self, steps: int, logs: Any) -> bool:
        """After so many steps of this epoch; whether to end the run here, which all ranks decide alike.

        `logs` is a mapping whose `later(name)` gives a figure that only `float` brings from its device.
        """

    def epoch_ends(self, epoch: int, logs: dict[str, Any], hooks: Any) -> None:
        """Before the user's callbacks: make `logs` those of all ranks, validation included."""

    def epoch_over(self, epoch: int, logs: dict[str, Any], asked_to_stop: bool) -> bool:
        """After the user's callbacks; whether the run ends, on all ranks."""


class Fitter(Stepper, Protocol):
    """A replica of a framework that runs its own loop over batches; `train/fit_loop.py` follows it.

    It steps as well, but its own loop is faster and calls the callbacks that its users know.

    Attributes:
        epoch_rows: This rank's rows of the epoch so far; counted by whoever knows them.
        may_idle: Whether steps of this rank may have no rows, as `build` was told.
    """

    epoch_rows: int
    may_idle: bool

    @property
    def stopping(self) -> bool:
        """Whether its own loop has been asked to end."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may still run when its end is told, so that to look at its figures is to wait."""

    def arrange(self, features: Sequence[str], labels: Sequence[str], *, by_name: bool = False) -> None:
        """Say what batches consist of; `by_name` where inputs came by name."""

    def build(self, features: Sequence[Array], labels: Sequence[Array], *, may_idle: bool = False) -> None:
        """Make everything that depends on the shapes of a batch; `may_idle` where steps may have no rows."""

    def try_metrics(self, batch: Batch) -> list[str]:
        """Where there are several ranks: complain about metrics that cannot be merged, tried on rows.

        Returns what the user should know of others.
        """

    def look_at(self, batch: Batch) -> None:
        """Before its own loop gets a batch: complain about labels that the model's loss cannot mean."""

    def share_steps(self, collective: Collective) -> None:
        """After `join`: in its own loop, apply the mean of all ranks' gradients."""

    def send_steps(self, learn: Callable[[Sequence[Array], float], list[Array]]) -> None:
        """After `join`: in its own loop, let `learn` have the gradients and set the parameters it returns.

        `learn(gradients, weight)` gets the gradient of the mean over this rank's rows, one array a trained
        parameter, and how many rows those are; 0 rows teach nothing.

        Raises:
            ConfigError: The model's steps cannot be divided like that.
        """

    def own_callbacks(self, callbacks: Sequence[Any]) -> list[Any]:
        """Those of the user's callbacks that run on this rank."""

    def remembering(self, callback: Any) -> Any:
        """What keeps a callback's memory in checkpoints: has `state_dict` and `load_state_dict`."""

    def hooks(self, callbacks: Sequence[Any], watch: Watch, *, size: int, epochs: int, steps: int) -> Any:
        """The user's callbacks between the calls of `watch`, in the form that `fit` takes."""

    def fit(
        self,
        feed: Feed,
        hooks: Any,
        *,
        epochs: tuple[int, int],
        class_weight: Mapping[int, float] | None = None,
        ends: bool = True,
    ) -> None:
        """The epochs from the first, counted from 0, to the one before the second."""

    def evaluate(self, feed: Feed, hooks: Any = None) -> None:
        """Judge the rows of `feed`; the figures stay in the tallies."""

    def begin_step(self) -> None:
        """Before each step."""

    def keep_step(self) -> None:
        """Before a step that may have to be undone."""

    def step_is_finite(self) -> bool:
        """After such a step: whether the weights that it made are finite."""

    def undo_step(self) -> None:
        """Make everything but `step` what it was at `keep_step`, metrics included."""

    def metric_states(self) -> bytes:
        """This rank's metrics so far; counting goes on."""

    def join_metric_states(self, states: Sequence[bytes]) -> bytes:
        """One state that stands for all ranks'."""

    def load_metric_states(self, joined: bytes) -> dict[str, Any]:
        """Hold that state, and tell it as numbers."""

    def figures(self) -> dict[str, Any]:
        """The metrics' present results, as plain numbers."""
