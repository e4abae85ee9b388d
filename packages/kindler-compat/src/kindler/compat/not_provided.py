"""Modules of the old systems that are not here: importing one says so, and what there is instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

from kindler.errors import ConfigError

__all__ = ["NotProvidedError", "refuse_the_rest"]

_KERAS = (
    "define the model with Keras or PyTorch, and train it with Estimator.from_keras or from_torch of"
    " zoo.orca.learn; layers of BigDL are in bigdl.nn.layer"
)
_SERIES = "make windows of the series with Spark or pandas, and search for a model with kindler.tune.search"
_SERVING = "store the model with kindler.om and serve it with `kindler serve`"
_IMAGES = "kindler.readers reads pictures, and zoo.feature.image has transformers"

# By the beginning of a name; the longest one counts.
_INSTEAD = {
    "bigdl.chronos": _SERIES,
    "bigdl.contrib": _KERAS,
    "bigdl.dataset": "bigdl.dataset.mnist is here; read other files with Spark, pandas or kindler.readers",
    "bigdl.dllib.estimator": "zoo.orca.learn.bigdl.Estimator, or zoo.pipeline.nnframes.NNEstimator",
    "bigdl.dllib.feature": "zoo.feature.common, zoo.feature.image and zoo.feature.text",
    "bigdl.dllib.keras": _KERAS,
    "bigdl.dllib.models": _KERAS,
    "bigdl.friesian": "kindler.XShards and Spark's own functions prepare tables",
    "bigdl.keras": _KERAS,
    "bigdl.models": _KERAS,
    "bigdl.nano": "kindler.Estimator trains on one machine as well",
    "bigdl.serving": _SERVING,
    "bigdl.transform.vision": _IMAGES,
    "zoo.automl": "kindler.tune.search",
    "zoo.chronos": _SERIES,
    "zoo.examples": "the examples of Kindler are in its folder examples/",
    "zoo.feature.image3d": _IMAGES,
    "zoo.friesian": "kindler.XShards and Spark's own functions prepare tables",
    "zoo.models": _KERAS,
    "zoo.orca.automl": "kindler.tune.search",
    "zoo.orca.data.image": "kindler.readers.read_images",
    "zoo.orca.data.tf": (
        "fit takes XShards as they are; a tf.data.Dataset is made in a creator function, where"
        " zoo.orca.learn.tf2 takes it, or passed to zoo.orca.learn.tf"
    ),
    "zoo.orca.learn.horovod": 'Estimator.from_torch(..., backend="horovod")',
    "zoo.orca.learn.mpi": "kindler.cluster.run starts your own program on every executor",
    "zoo.orca.ray": "kindler.cluster.run starts your own program on every executor, without Ray",
    "zoo.pipeline.api.autograd": _KERAS,
    "zoo.pipeline.api.keras": _KERAS,
    "zoo.pipeline.api.keras2": _KERAS,
    "zoo.pipeline.api.onnx": "kindler.om keeps ONNX models and predicts with them",
    "zoo.pipeline.api.torch": "zoo.orca.learn.pytorch.Estimator takes torch models as they are",
    "zoo.pipeline.estimator": "zoo.orca.learn.bigdl.Estimator, or zoo.pipeline.nnframes.NNEstimator",
    "zoo.pipeline.inference": _SERVING,
    "zoo.pipeline.nnframes": "NNEstimator, NNModel, NNClassifier and NNClassifierModel are here",
    "zoo.ray": "kindler.cluster.run starts your own program on every executor, without Ray",
    "zoo.serving": _SERVING,
    "zoo.tfpark.text": "your own Keras model in zoo.tfpark.KerasModel",
    "zoo.util.tf": "TFNet.from_session(sess, inputs, outputs) of zoo.tfpark, which needs no export",
    "zoo.zouwu": _SERIES,
}


class NotProvidedError(ConfigError, ImportError):
    """A module of an old system that Kindler does not have."""


class _Finder(MetaPathFinder):
    """Asked last, for modules that no other finder has found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        name = fullname.removeprefix(f"{__package__}.")
        known = [start for start in _INSTEAD if f"{name}.".startswith(f"{start}.")]
        known = known or [start for start in _INSTEAD if start.startswith(f"{name}.")]  # a package of them
        if name != fullname and known:
            raise NotProvidedError(
                f"{name} is not among the modules that kindler.compat provides "
                f"of {name.partition('.')[0]}.\nHint: {_INSTEAD[max(known, key=len)]}."
            )


def refuse_the_rest() -> None:
    """From now on, importing a module that is not here says what there is instead."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
