"""Which modules of a model train and which rest in evaluation mode.

The rule: a module that was in evaluation mode when the model was handed over, the model itself being in
training mode, rests for the whole run, as a BatchNorm that is kept frozen. All others are in training mode
in every training step, whatever callbacks did to them in between. A model that is in evaluation mode as a
whole says nothing about its parts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Modes:
    """Switches a model between training and evaluation.

    Attributes:
        resting: Names of the modules that stay in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._said = model.training
        self.resting = _resting(model)
        self._expected: list[tuple[nn.Module, bool]] = []
        self._trains: bool | None = None
        self._begun = False

    def recall(self, resting: Iterable[str]) -> None:
        """Take over which modules rested in an earlier run, unless this model says so itself."""
        if not self._said:
            self.resting = set(resting)

    def train(self) -> None:
        if not self._begun:  # what `on_run_begin` has put to rest belongs to the beginning too
            self._begun = True
            self.resting |= _resting(self._model)
        if self._trains and all(module.training is mode for module, mode in self._expected):
            return
        self._model.train()  # first: a model may have its own idea of it
        modules = dict(self._model.named_modules())
        for name in self.resting & modules.keys():
            modules[name].training = False
        self._expected = [(module, module.training) for module in modules.values()]
        self._trains = True

    def evaluate(self) -> None:
        if self._trains is not False or self._model.training:
            self._model.eval()
            self._trains = False


def _resting(model: nn.Module) -> set[str]:
    if not model.training:
        return set()
    return {name for name, module in model.named_modules() if not module.training}
