"""omega|ml's runtime: `require(always=True)`, and labels that are stored with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kindler.runtime import runtime
from kindler.runtime.engine import Engine
from kindler.runtime.messages import TaskSettings
from kindler.runtime.runtime import RuntimeModel, Sender
from kindler.shelves.models import Models
from kindler.store import VersionStore

_DEFAULT = TaskSettings().label
_REQUIRE = "require"


class Runtime(runtime.Runtime):
    """The runtime; a model that has a label runs on workers with that label, unless another is required."""

    def __init__(
        self,
        store: VersionStore,
        bucket: str,
        engine: Callable[[], Engine],
        settings: TaskSettings | None = None,
        always: Callable[[str | None], None] | None = None,
    ) -> None:
        super().__init__(store, bucket, engine, settings)
        self.always = always

    def options(self, **settings: Any) -> Runtime:
        """The same runtime with other settings; see `kindler.runtime.runtime.Runtime.options`."""
        changed = super().options(**settings)
        assert isinstance(changed, Runtime)
        changed.always = self.always
        return changed

    def require(self, label: str | None = None, *, always: bool = False) -> Runtime:
        """The same runtime on workers with this label; None means any worker.

        With `always` also all that `om.runtime` runs from now on.
        """
        if always and self.always is not None:
            self.always(label)
        return self.options(label=label or _DEFAULT)

    def model(self, name: str) -> RuntimeModel:
        """A stored model, on workers with its own label if it has one."""
        models = Models(self._store, self._bucket)
        settings = self.settings
        if settings.label == _DEFAULT and models.exists(name):
            required = models.metadata(name).attributes.get(_REQUIRE)
            label = required.get("label") if isinstance(required, dict) else required
            settings = replace(settings, label=label or _DEFAULT)
        return _Model(name, self._sent, settings, models)


class _Model(RuntimeModel):
    """A model whose label can be stored with it."""

    def __init__(self, name: str, send: Sender, settings: TaskSettings, models: Models) -> None:
        super().__init__(name, send, settings)
        self._models = models

    def require(self, label: str | None = None, *, always: bool = False) -> _Model:
        """The same, on workers with this label; None means any worker.

        With `always` it is stored with the model, as a version that differs in nothing else.
        """
        changed = replace(self._settings, label=label or _DEFAULT)
        if always:
            found = self._models.metadata(self.name)
            attributes = {key: value for key, value in found.attributes.items() if key != _REQUIRE}
            if label:
                attributes[_REQUIRE] = {"label": label}
            self._models.store.publish(
                found.address, kind=found.kind, meta=found.meta, attributes=attributes, shared=found.files
            )
        return _Model(self.name, self._send, changed, self._models)
