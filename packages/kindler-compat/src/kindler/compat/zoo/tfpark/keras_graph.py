"""A Keras model that was built in a graph of TensorFlow 1, trained as that graph."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

from kindler.compat.zoo.tfpark.rows import Columns
from kindler.compat.zoo.tfpark.training import TFParkEstimator, graph_estimator
from kindler.errors import ConfigError


def is_graph_model(model: Any) -> bool:
    """Whether the model lives in a graph, with a session, instead of executing eagerly."""
    return any(cls.__module__.endswith("engine.training_v1") for cls in type(model).__mro__)


class KerasGraph:
    """The graph of a model of `tf_keras`."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model = model
        self.given = optimizer

    @property
    def compiled(self) -> bool:
        return getattr(self.model, "optimizer", None) is not None and bool(
            getattr(self.model, "_is_compiled", False)
        )

    @property
    def session(self) -> Any:
        """Keras's session, with the model's variables initialized."""
        return self._backend.get_session(self.model.inputs)

    def estimator(
        self, *, model_dir: str | None = None, metrics: Any = None, **options: Any
    ) -> TFParkEstimator:
        from kindler.compat.zoo.tfpark.optimizers import graph_optimizers

        model = self.model
        training: dict[str, Any] = {}
        if self.compiled:
            optimizer = self.given if self.given is not None else model.optimizer
            training = {
                "labels": list(model._feed_targets),
                "loss": model.total_loss,
                "optimizer": graph_optimizers(optimizer),
                "metrics": {**self._metrics(), **(metrics or {})},
                "updates": list(model.updates),
            }
        return graph_estimator(
            inputs=list(model.inputs),
            outputs=list(model.outputs),
            sess=self.session,
            tensor_with_value=self._phase(),
            model_dir=model_dir,
            **training,
            **options,
        )

    def columns(self, columns: Columns) -> Columns:
        """Columns with labels of the shape that Keras's targets have: a scalar becomes (1,)."""
        if not self.compiled:
            return columns
        if not columns.has_columns:
            return replace(columns, data=columns.data.map(self._expanded))
        targets = self.model._feed_targets
        if len(targets) != len(columns.labels):
            raise ConfigError(
                f"the model has {len(targets)} targets, and the dataset {len(columns.labels)} labels."
            )
        shapes = dict(columns.shapes)
        for name, target in zip(columns.labels, targets, strict=True):
            if target.shape.rank == 2 and (shapes.get(name) == () or name not in shapes):
                shapes[name] = (1,)
        return replace(columns, shapes=shapes)

    def _expanded(self, features: Any, labels: Any) -> tuple[Any, Any]:
        import tensorflow.compat.v1 as tf

        def wide(label: Any, target: Any) -> Any:
            return tf.expand_dims(label, -1) if target.shape.rank == label.shape.rank + 1 else label

        targets = self.model._feed_targets
        if len(targets) == 1:
            return features, wide(labels, targets[0])
        return features, tuple(wide(label, target) for label, target in zip(labels, targets, strict=True))

    @property
    def _backend(self) -> Any:
        return importlib.import_module("tf_keras.api._v1.keras").backend

    def _phase(self) -> dict[Any, tuple[bool, bool]] | None:
        """Keras's switch between training and inference, where the model has one."""
        phase = self._backend.learning_phase()
        if not hasattr(phase, "op") or phase.graph is not self.model.inputs[0].graph:
            return None
        return {phase: (True, False)}

    def _metrics(self) -> dict[str, Any]:
        """The metrics that are means over rows, as tensors."""
        import tensorflow.compat.v1 as tf

        model, found = self.model, {}
        per_output = getattr(model, "_per_output_metrics", None) or []
        for output, target, metrics in zip(model.outputs, model._feed_targets, per_output, strict=False):
            for name, metric in (metrics or {}).items():
                function = getattr(metric, "_fn", None)
                if function is None:
                    warnings.warn(
                        f"the metric {name!r} is not a mean over rows; it is left out.\n"
                        "Hint: evaluate it on what predict returns.",
                        stacklevel=2,
                    )
                    continue
                with output.graph.as_default():
                    found[name] = tf.reduce_mean(
                        function(target, output, **(getattr(metric, "_fn_kwargs", None) or {}))
                    )
        return found
