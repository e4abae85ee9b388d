"""The user's model on the driver: how its framework handles it, and its trained state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kindler.frameworks.registry import FRAMEWORKS

__all__ = ["FrameworkModel", "LiveModel", "keras_model", "torch_model"]


@dataclass(frozen=True, kw_only=True)
class FrameworkModel:
    """The user's model, and how its framework handles it.

    Attributes:
        framework: The framework's name in the registry.
        spec: The model and what trains it, as the user passed them.
        pack: Makes bytes of the spec, for the workers.
        lacking: Complaints about each of the named parts that the spec does not have.
        against_several: Complaints about training it with several workers.
        entry: The function that its workers run.
        extra_preload: What its workers import ahead of need, besides the framework.
        environment: Variables that must be set before the framework is imported.
    """

    framework: str
    spec: Any
    pack: Callable[[Any], bytes]
    lacking: Callable[..., list[str]]
    against_several: Callable[[Any], list[str]]
    entry: str = "kindler.train.loop:run"
    extra_preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def preload(self) -> tuple[str, ...]:
        return (FRAMEWORKS.spec(self.framework).preload, *self.extra_preload)

    @property
    def packed(self) -> bytes:
        """The spec as bytes."""
        return self.pack(self.spec)


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

    @property
    def state(self) -> bytes:
        """What training continues from; empty for a new model."""
        # A Keras model may have been compiled again, or given other weights.
        if self._model.framework == "keras" and self._state and self._replica is not None:
            self._state = self._replica.state()
        return self._state

    @state.setter
    def state(self, state: bytes) -> None:
        self._state = state
        has_instance = FRAMEWORKS.load(self._model.framework).has_instance
        if state and (self._replica is not None or has_instance(self._model.spec)):
            self.replica.load_state(state)

    @property
    def replica(self) -> Any:
        """The model itself, made on first use."""
        if self._replica is None:
            replica_type = FRAMEWORKS.load(self._model.framework)
            self._replica = replica_type(self._model.spec, device="cpu", seed=self._seed)
            if self._state:
                self._replica.load_state(self._state)
        return self._replica

    def load_weights(self, path: str) -> None:
        """Read a file that the framework wrote."""
        self.replica.load(path)
        self._state = self.replica.state()

    def load_state(self, state: bytes) -> None:
        """Load a state now, whether or not the model was in use: a wrong one is refused here."""
        self.replica.load_state(state)
        self._state = state


def torch_model(spec: Any, preload: tuple[str, ...] = ()) -> FrameworkModel:
    """A PyTorch model of its spec, or of the bytes of one."""
    FRAMEWORKS.load("torch")
    from kindler.frameworks.torch.spec import against_several, dumps, loads

    return FrameworkModel(
        framework="torch",
        spec=loads(spec) if isinstance(spec, bytes) else spec,
        pack=dumps,
        lacking=_torch_lacking,
        against_several=against_several,
        extra_preload=preload,
    )


def keras_model(spec: Any, preload: tuple[str, ...] = ()) -> FrameworkModel:
    """A Keras model of its spec, or of the bytes of one."""
    from kindler.frameworks.keras import backends
    from kindler.frameworks.keras.spec import against_several, dumps, lacking, revived

    whole = revived(spec) if isinstance(spec, bytes) else spec
    return FrameworkModel(
        framework="keras",
        spec=whole,
        pack=dumps,
        lacking=lacking,
        against_several=against_several,
        entry="kindler.train.keras_loop:run",
        extra_preload=preload,
        environment=backends.environment(whole.backend),
    )


def _torch_lacking(spec: Any, *names: str) -> list[str]:
    return [
        f"this needs {'an' if name[0] in 'aeiou' else 'a'} {name}; pass {name}=... to Estimator.from_torch."
        for name in names
        if getattr(spec, name) is None
    ]
