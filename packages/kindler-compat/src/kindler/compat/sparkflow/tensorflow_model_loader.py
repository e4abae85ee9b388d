"""Models that TensorFlow's Saver has written, as stages."""

from __future__ import annotations

from typing import Any

from pyspark.ml.pipeline import PipelineModel

from kindler.compat.sparkflow.graphs import OpenGraph, check_graph, json_format, tf
from kindler.compat.sparkflow.tensorflow_async import SparkAsyncDLModel
from kindler.errors import ConfigError

__all__ = ["attach_tensorflow_model_to_pipeline", "load_tensorflow_model"]


def load_tensorflow_model(
    path: str,
    inputCol: str,
    tfInput: str,
    tfOutput: str,
    predictionCol: str = "predicted",
    tfDropout: str | None = None,
    toKeepDropout: bool = False,
    *,
    trusted: bool = False,
) -> SparkAsyncDLModel:
    """Read exactly the checkpoint that `path` names, with its graph.

    `path` is what was given to `tf.train.Saver.save`, with the number of the step if it had one. Other
    arguments are the params of `SparkAsyncDLModel`; a graph that does more than compute must be `trusted`.
    """
    if not tf.train.checkpoint_exists(path) or not tf.gfile.Exists(f"{path}.meta"):
        newest = tf.train.latest_checkpoint(path) or tf.train.latest_checkpoint(
            path.rpartition("/")[0] or "."
        )
        hint = f"\nHint: the newest one there is {newest!r}." if newest else ""
        raise ConfigError(f"there is no checkpoint {path!r} with a {path}.meta.{hint}")
    text = _graph_of(path, [tfInput, tfOutput, *filter(None, [tfDropout])])
    check_graph(text, trusted=trusted)
    opened = OpenGraph.of(text)
    reader = tf.train.load_checkpoint(path)
    kept = reader.get_variable_to_shape_map()
    names = [name for name in opened.values() if name.rpartition(":")[0] in kept]
    opened.assign({name: reader.get_tensor(name.rpartition(":")[0]) for name in names})
    return SparkAsyncDLModel(
        inputCol=inputCol,
        modelJson=text,
        tfInput=tfInput,
        tfOutput=tfOutput,
        tfDropout=tfDropout,
        toKeepDropout=toKeepDropout,
        predictionCol=predictionCol,
    ).with_values(opened.values())


def attach_tensorflow_model_to_pipeline(
    path: str, pipelineModel: PipelineModel, *args: Any, **options: Any
) -> PipelineModel:
    """A pipeline that ends with such a model; other arguments are those of `load_tensorflow_model`."""
    return PipelineModel([pipelineModel, load_tensorflow_model(path, *args, **options)])


def _graph_of(path: str, tensors: list[str]) -> str:
    """The graph without what saves and restores it, and without the optimizer."""
    graph = tf.Graph()
    with graph.as_default():
        tf.train.import_meta_graph(f"{path}.meta", clear_devices=True)
        needed = [name.partition(":")[0] for name in tensors]
        missing = [name for name in needed if name not in {op.name for op in graph.get_operations()}]
        if missing:
            raise ConfigError(f"the graph of {path!r} has no tensor {missing[0]!r}.")
        definition = graph.as_graph_def()
        reached = {node.name for node in tf.graph_util.extract_sub_graph(definition, needed).node}
        variables = [v for v in tf.global_variables() if v.op.name in reached]
        ends = [*needed, *(v.initializer.name for v in variables), *(_read(v) for v in variables)]
        part = tf.graph_util.extract_sub_graph(definition, ends)
        trained = {v.name for v in tf.trainable_variables()}
        graph.clear_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        graph.clear_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
        for variable in variables:
            graph.add_to_collection(tf.GraphKeys.GLOBAL_VARIABLES, variable)
            if variable.name in trained:
                graph.add_to_collection(tf.GraphKeys.TRAINABLE_VARIABLES, variable)
        kept = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES]
        meta_graph: Any = tf.train.export_meta_graph(graph_def=part, collection_list=kept, clear_devices=True)
    return str(json_format().MessageToJson(meta_graph))


def _read(variable: Any) -> str:
    return str(variable._as_graph_element().op.name)
