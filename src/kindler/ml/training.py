"""What trains the model of a stage that is saved before it was fitted: optimizer, loss, metrics, creators.

They are code of the user's, and are saved as a pickle that is read only within `trusting()`. What needs no
trust is for the kind of the model to say, see `FrameworkKind.describe_training`.
"""

from __future__ import annotations

from pathlib import Path

import cloudpickle

from kindler.estimator.estimator import Estimator
from kindler.estimator.model import FrameworkModel

_RECIPE = "training.pickle"


def write_recipe(estimator: Estimator, folder: Path) -> bool:
    """Write all that the estimator is; returns whether that was possible."""
    model = estimator._model
    recipe = {
        "model": (model.framework, model.packed, model.extra_preload),
        "options": {
            **{name: value for name, value in vars(estimator._run_config).items() if name != "model_dir"},
            "preparation": estimator._preparation,
        },
        "state": estimator._live.state,
        "columns": (estimator.signature, list(estimator.history)),
    }
    try:
        (folder / _RECIPE).write_bytes(cloudpickle.dumps(recipe))
    except Exception:  # noqa: BLE001 - objects of the user's that cannot be pickled; the model is saved without
        return False
    return True


def read_recipe(folder: Path) -> Estimator | None:
    """The estimator again; None if it was saved without. Runs code of the file."""
    if not (folder / _RECIPE).is_file():
        return None
    recipe = cloudpickle.loads((folder / _RECIPE).read_bytes())
    made = Estimator(FrameworkModel.unpacked(*recipe["model"]), **recipe["options"])
    if recipe["state"]:
        made._live.state = recipe["state"]
    return made.restore_columns(*recipe["columns"])
