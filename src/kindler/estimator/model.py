"""The user's model on the driver: how its framework handles it, and its trained state."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

from kindler.frameworks.caller_state import untouched
from kindler.frameworks.registry import FRAMEWORKS, FrameworkSpec
from kindler.frameworks.scoring_model import ScoringModel
from kindler.inference.predictor import forget_model
from kindler.train.joining import LOOPS

# The same for every run, so that runs of all kinds find the same warm process. Each fork would import these
# otherwise, Arrow among them: a tenth of a second of every worker.
_WORKERS_NEED = (
    *(entry.partition(":")[0] for entry in LOOPS.values()),
    "kindler.inference.files",
    "kindler.sync.allreduce",
)


@dataclass(frozen=True, kw_only=True)
class FrameworkModel:
    """The user's model, handled by its framework: see `frameworks/contract.py`.

    Attributes:
        framework: The framework's name in the registry.
        spec: The model and what trains it, as the user passed them.
        extra_preload: What its workers import ahead of need, besides the framework.
    """

    framework: str
    spec: Any
    extra_preload: tuple[str, ...] = ()

    @classmethod
    def unpacked(cls, framework: str, packed: bytes, extra_preload: tuple[str, ...]) -> FrameworkModel:
        """The model whose spec these bytes are."""
        with untouched():
            spec = FRAMEWORKS.load(framework).loads(packed)
        return cls(framework=framework, spec=spec, extra_preload=extra_preload)

    @property
    def row(self) -> FrameworkSpec:
        """What the framework can do."""
        return FRAMEWORKS.spec(self.framework)

    @property
    def replica_type(self) -> Any:
        """The framework's class."""
        return FRAMEWORKS.load(self.framework)

    @property
    def entry(self) -> str:
        """The function that its workers run."""
        return LOOPS[self.row.loop]

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Variables that must be set before the framework is imported."""
        variables: tuple[tuple[str, str], ...] = self.replica_type.environment(self.spec)
        return variables

    @property
    def preload(self) -> tuple[str, ...]:
        """What its workers import ahead of need: the framework, and what trains and scores with it."""
        return (*filter(None, [self.row.preload]), *_WORKERS_NEED, *self.extra_preload)

    @property
    def packed(self) -> bytes:
        """The spec as bytes, for the workers."""
        with untouched():
            packed: bytes = self.replica_type.dumps(self.spec)
        return packed

    def expected_bytes(self, seed: int) -> int:
        """The size of its state once it was trained, if the user gave the model itself; otherwise 0."""
        if not self.replica_type.has_instance(self.spec):
            return 0
        with untouched():
            replica = self.replica_type(self.spec, device="cpu", seed=seed)
            return int(replica.expected_bytes())

    def lacking(self, *names: str) -> list[str]:
        """Complaints about each of "optimizer" and "loss" that the spec does not have."""
        complaints: list[str] = self.replica_type.lacking(self.spec, *names)
        return complaints

    @property
    def needs_labels(self) -> bool | Literal["found"]:
        """Whether training and judging it takes labels; "found": where there are some."""
        needed: bool | Literal["found"] = self.replica_type.needs_labels(self.spec)
        return needed

    def as_data(self, data: Any) -> Any:
        """Data in a form that Kindler takes."""
        return self.replica_type.as_data(self.spec, data)

    def against_data(self, data: Any) -> list[str]:
        """Complaints about data that cannot feed it, as far as the driver can know."""
        complaints: list[str] = self.replica_type.against_data(self.spec, data)
        return complaints

    def against_row_weights(self) -> list[str]:
        """Complaints about weighing the losses of its rows."""
        complaints: list[str] = self.replica_type.against_row_weights(self.spec)
        return complaints

    def against_several(self) -> list[str]:
        """Complaints about training it with several workers."""
        complaints: list[str] = self.replica_type.against_several(self.spec)
        return complaints

    def against_server(self) -> list[str]:
        """Complaints about letting a parameter server apply its updates."""
        complaints: list[str] = self.replica_type.against_server(self.spec)
        return complaints

    def against_parts(self) -> list[str]:
        """Complaints about dividing its parameters between several servers."""
        complaints: list[str] = self.replica_type.against_parts(self.spec)
        return complaints

    def against_division(self, asked: str | None) -> list[str]:
        """Complaints about dividing its optimizer between workers."""
        complaints: list[str] = self.replica_type.against_division(self.spec, asked)
        return complaints


class LiveModel:
    """The model in this process: the user's own instance if one was given, with the state of the last run.

    Args:
        model: The model.
        seed: Decides the initial weights of a model that was never trained.
    """

    def __init__(self, model: FrameworkModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._state = b""
        self._replica: Any = None
        self._scoring: ScoringModel | None = None
        self._packing = threading.Lock()

    @property
    def state(self) -> bytes:
        """What training continues from; empty for a new model."""
        # A live model may have been compiled again, or given other weights.
        if self._model.row.live and self._state and self._replica is not None:
            with untouched():
                self._state = self._replica.state()
        return self._state

    @state.setter
    def state(self, state: bytes) -> None:
        self._state = state
        model = self._model
        if state and (self._replica is not None or model.replica_type.has_instance(model.spec)):
            with untouched():
                self.replica.load_state(state)

    @property
    def is_untrained(self) -> bool:
        """Whether its weights are those that a creator makes: random ones, unless it loads others."""
        model = self._model
        return (
            not self._state and "train" in model.row.can and not model.replica_type.has_instance(model.spec)
        )

    @property
    def replica(self) -> Any:
        """The model itself, made on first use."""
        if self._replica is None:
            model = self._model
            with untouched():
                self._replica = model.replica_type(model.spec, device="cpu", seed=self._seed)
                if self._state:
                    self._replica.load_state(self._state)
        return self._replica

    def for_scoring(self) -> ScoringModel:
        """The model as it is now, for processes that only score with it."""
        with self._packing:
            made: ScoringModel = self._model.replica_type.scoring_model(
                self._model.spec, self._replica, lambda: self.state, self._scoring
            )
            if self._scoring is not None and self._scoring.content != made.content:
                forget_model(self._scoring.content)  # frames that still need it are scored elsewhere
            self._scoring = made
        return made

    def load_weights(self, path: str) -> None:
        """Read a file that the framework wrote."""
        self.replica.load(path)
        self._state = self.replica.state()

    def load_state(self, state: bytes) -> None:
        """Load a state now, whether or not the model was in use: a wrong one is refused here."""
        self.replica.load_state(state)
        self._state = state
