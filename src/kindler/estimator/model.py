"""The user's model on the driver: how its framework handles it, and its trained state."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kindler.frameworks.caller_state import untouched
from kindler.frameworks.contract import Facts, Use
from kindler.frameworks.registry import FRAMEWORKS, FrameworkSpec
from kindler.frameworks.state_format import ScoringModel
from kindler.inference.predictor import forget_model
from kindler.train.run import ENTRY

# The same for every run, so that runs of all kinds find the same warm process. Each fork would import these
# otherwise, Arrow among them: a tenth of a second of every worker.
_WORKERS_NEED = (
    ENTRY.partition(":")[0],
    "kindler.inference.files",
    "kindler.sync.allreduce",
)


@dataclass(frozen=True, kw_only=True)
class FrameworkModel:
    """The user's model and what trains it (`spec`), as its framework handles it."""

    framework: str
    spec: Any
    extra_preload: tuple[str, ...] = ()

    @classmethod
    def unpacked(cls, framework: str, packed: bytes, extra_preload: tuple[str, ...]) -> FrameworkModel:
        with untouched():
            spec = FRAMEWORKS.load(framework).loads(packed)
        return cls(framework=framework, spec=spec, extra_preload=extra_preload)

    @property
    def row(self) -> FrameworkSpec:
        return FRAMEWORKS.spec(self.framework)

    @property
    def replica_type(self) -> Any:
        return FRAMEWORKS.load(self.framework)

    @property
    def facts(self) -> Facts:
        facts: Facts = self.replica_type.facts(self.spec)
        return facts

    def complaints(self, use: Use, value: Any = None) -> list[str]:
        complaints: list[str] = self.replica_type.complaints(self.spec, use, value)
        return complaints

    @property
    def preload(self) -> tuple[str, ...]:
        """What its workers import in advance: the framework, and what trains and scores with it."""
        return (*filter(None, [self.row.preload]), *_WORKERS_NEED, *self.extra_preload)

    @property
    def packed(self) -> bytes:
        with untouched():
            packed: bytes = self.replica_type.dumps(self.spec)
        return packed

    def expected_bytes(self, seed: int) -> int:
        if not self.facts.has_instance:
            return 0
        with untouched():
            replica = self.replica_type(self.spec, device="cpu", seed=seed)
            return int(replica.expected_bytes())


class LiveModel:
    """The model in this process: the user's own instance if given, with the state of the last run."""

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
        if state and (self._replica is not None or model.facts.has_instance):
            with untouched():
                self.replica.load_state(state)

    @property
    def is_untrained(self) -> bool:
        """Whether its weights are a creator's: random, unless the creator loads others."""
        model = self._model
        return not self._state and "train" in model.row.can and not model.facts.has_instance

    @property
    def replica(self) -> Any:
        if self._replica is None:
            model = self._model
            with untouched():
                self._replica = model.replica_type(model.spec, device="cpu", seed=self._seed)
                if self._state:
                    self._replica.load_state(self._state)
        return self._replica

    def for_scoring(self) -> ScoringModel:
        with self._packing:
            made: ScoringModel = self._model.replica_type.scoring_model(
                self._model.spec, self._replica, lambda: self.state, self._scoring
            )
            if self._scoring is not None and self._scoring.content != made.content:
                forget_model(self._scoring.content)  # frames that still need it are scored elsewhere
            self._scoring = made
        return made

    def load_weights(self, path: str) -> None:
        self.replica.load(path)
        self._state = self.replica.state()

    def load_state(self, state: bytes) -> None:
        """Load a state now, even if the model is not in use yet, so that a wrong one is refused here."""
        self.replica.load_state(state)
        self._state = state
