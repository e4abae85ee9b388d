"""SavedModels in a store: only harmless operations get in or out without trust."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pytest

from kindler import Store
from kindler.errors import UntrustedError
from kindler.models.safety import allowed_names
from kindler.models.safety.saved_model import dangers

pytestmark = pytest.mark.skipif(
    flavour.FLAVOUR not in ("tensorflow", "tf_keras"), reason="a thing of TensorFlow's"
)

# What an operation is called, or calls its inputs and attributes, that reaches out of the graph. Tables and
# variables name nothing but themselves.
_REACHING_NAME = re.compile(
    "File|Dataset|Iterator|PyFunc|Rpc|Server|Summary|Save|Restore|Checkpoint|Reader|Print|Dump|Debug|Collective|"
    "Send$|Recv|Xla|TPU|Remote|Session|Mlir|Abort|Sleep|DecodeProto|EncodeProto|ParseTensor|Sql|LMDB|RecordInput"
)
_REACHING_WORD = re.compile(
    "file|path|^dir|address|url|host|server|module|graph|descriptor|program|token|logdir|_dir|protocol|executable"
)
_MEANS_SOMETHING_ELSE = ("direction", "top_paths", "host_reserved")


def registered() -> Any:
    """Every operation that this TensorFlow has."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    found = op_def_pb2.OpList()
    found.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return found.op


def saved(folder: Path, change: Callable[[Any], None]) -> Path:
    """A SavedModel that was made by hand."""
    from tensorflow.core.protobuf import saved_model_pb2

    made = saved_model_pb2.SavedModel()
    if (folder / "saved_model.pb").exists():
        made.ParseFromString((folder / "saved_model.pb").read_bytes())
    else:
        folder.mkdir()
        made.meta_graphs.add()
    change(made.meta_graphs[0])
    (folder / "saved_model.pb").write_bytes(made.SerializeToString())
    return folder


def test_no_operation_that_reaches_out_of_the_graph_is_harmless() -> None:
    reaching = set()
    for op in registered():
        words = {argument.name for argument in (*op.input_arg, *op.attr)}.difference(_MEANS_SOMETHING_ELSE)
        if _REACHING_NAME.search(op.name) or any(_REACHING_WORD.search(word) for word in words):
            reaching.add(op.name)

    assert len(reaching) > 300
    assert reaching & allowed_names("tensorflow operations") == set()


def test_every_registered_operation_that_is_not_known_to_be_harmless_is_named(tmp_path: Path) -> None:
    names = {op.name for op in registered()}
    assert names >= allowed_names("tensorflow operations")  # no typing errors

    def add(graph: Any) -> None:
        for name in names:
            graph.graph_def.node.add(name=f"n{name}", op=name)

    found = dangers(saved(tmp_path / "all", add))
    assert set(found) == {f"the operation {name}" for name in names - allowed_names("tensorflow operations")}


def test_functions_are_looked_through_like_the_graph(tmp_path: Path) -> None:
    def add(graph: Any) -> None:
        function = graph.graph_def.library.function.add()
        function.signature.name = "__inference_f_1"
        function.node_def.add(name="x", op="ReadFile")

    assert dangers(saved(tmp_path / "f", add)) == ["the operation ReadFile"]


def test_a_function_cannot_take_the_name_of_an_operation(tmp_path: Path) -> None:
    def add(graph: Any) -> None:
        graph.graph_def.library.function.add().signature.name = "ReadFile"
        graph.graph_def.node.add(name="x", op="ReadFile")

    assert dangers(saved(tmp_path / "f", add)) == ["the operation ReadFile"]


def test_a_function_that_is_not_in_the_file_is_not_known(tmp_path: Path) -> None:
    def add(graph: Any) -> None:
        node = graph.graph_def.node.add(name="x", op="PartitionedCall")
        node.attr["f"].func.name = "elsewhere"

    assert dangers(saved(tmp_path / "f", add)) == ["the operation elsewhere"]


def test_a_constant_that_forges_a_handle_is_refused(tmp_path: Path) -> None:
    def add(graph: Any) -> None:
        node = graph.graph_def.node.add(name="x", op="Const")
        node.attr["value"].tensor.resource_handle_val.add(name="of others")

    assert dangers(saved(tmp_path / "f", add)) == ["a constant that is a handle"]


def test_an_asset_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    found = dangers(
        saved(tmp_path / "f", lambda graph: graph.asset_file_def.add(filename="../../etc/passwd"))
    )
    assert found == ["the asset '../../etc/passwd', which is outside the model"]


def plain(folder: Path) -> Path:
    import tensorflow as tf

    class Plain(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.variable = tf.Variable([2.0])

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def __call__(self, x: Any) -> Any:
            return x * self.variable

    tf.saved_model.save(Plain(), str(folder))
    return folder


def test_the_functions_that_save_variables_pass_as_long_as_nothing_else_calls_them(tmp_path: Path) -> None:
    folder = plain(tmp_path / "plain")
    assert dangers(folder) == []

    def saver_of(graph: Any) -> str:
        nodes = {node.name: node for node in graph.graph_def.node}
        return str(nodes[graph.saver_def.save_tensor_name.partition(":")[0]].attr["f"].func.name)

    def as_an_object(graph: Any) -> None:
        graph.object_graph_def.nodes.add().bare_concrete_function.concrete_function_name = saver_of(graph)

    def in_a_function(graph: Any) -> None:
        served = next(f for f in graph.graph_def.library.function if "call" in f.signature.name)
        served.node_def.add(name="x", op="PartitionedCall").attr["f"].func.name = saver_of(graph)

    def as_a_gradient(graph: Any) -> None:
        graph.graph_def.library.gradient.add(function_name="f", gradient_func=saver_of(graph))

    def by_the_loader_of_version_1(graph: Any) -> None:
        graph.ClearField("object_graph_def")

    for change in (as_an_object, in_a_function, as_a_gradient, by_the_loader_of_version_1):
        changed = saved(plain(tmp_path / change.__name__), change)
        assert "the operation SaveV2" in dangers(changed)


@pytest.mark.parametrize("way", ["constant", "table", "graph in a string"])
def test_a_saved_model_cannot_reach_a_file_by_a_detour(tmp_path: Path, way: str) -> None:
    import tensorflow as tf

    om = Store(tmp_path / "store")
    secret = tmp_path / "secret"
    secret.write_text("secret\n")

    class Evil(tf.Module):
        @tf.function(input_signature=[])
        def __call__(self) -> Any:
            if way == "constant":
                return tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[6], memory_region_name=str(secret))
            if way == "table":
                table = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
                tf.raw_ops.InitializeTableFromTextFileV2(
                    table_handle=table, filename=str(secret), key_index=-2, value_index=-1
                )
                return tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=tf.string, Tvalues=tf.int64)[
                    0
                ]
            data = tf.data.Dataset.from_tensors(str(secret)).map(tf.io.read_file)
            graph = tf.raw_ops.DatasetToGraphV2(input_dataset=data._variant_tensor)
            return tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(tf.get_static_value(graph) or b""))

    tf.saved_model.save(Evil(), str(tmp_path / "evil"))
    with pytest.raises(UntrustedError, match="the operation"):
        om.models.put(tmp_path / "evil", "evil")
    om.models.put(tmp_path / "evil", "evil", trusted=True)
    with pytest.raises(UntrustedError, match="the operation"):
        om.models.get("evil")


def models(keras: Any) -> dict[str, Any]:
    layers = keras.layers
    text = layers.TextVectorization(max_tokens=20, output_sequence_length=4, vocabulary=["a", "b", "c"])
    word = layers.Input((1,), dtype="string")
    number = layers.Input((1,))
    image = [
        layers.Input((8, 8, 3)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
    ]
    sequence = [layers.Input((7,)), layers.Embedding(20, 4, mask_zero=True)]
    return {
        "dense": [
            layers.Input((4,)),
            layers.Dense(3, "gelu"),
            layers.LayerNormalization(),
            layers.Dropout(0.5),
        ],
        "conv": [
            *image,
            layers.MaxPooling2D(),
            layers.SeparableConv2D(4, 2),
            layers.GlobalAveragePooling2D(),
        ],
        "lstm": [*sequence, layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3)],
        "text": keras.Model(word, layers.Dense(2)(layers.Embedding(20, 3)(text(word)))),
        "lookup": keras.Model(word, layers.StringLookup(vocabulary=["a", "b"])(word)),
        "buckets": keras.Model(number, layers.Discretization(bin_boundaries=[0.0, 1.0])(number)),
    }


@pytest.mark.parametrize("name", ["dense", "conv", "lstm", "text", "lookup", "buckets"])
def test_exports_of_ordinary_models_need_no_trust(tmp_path: Path, keras: Any, name: str) -> None:
    made = models(keras)[name]
    model = keras.Sequential(made) if isinstance(made, list) else made
    model.export(str(tmp_path / "exported"))
    assert dangers(tmp_path / "exported") == []


def test_a_module_of_tensorflows_own_needs_no_trust(tmp_path: Path) -> None:
    import tensorflow as tf

    class Learns(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([1.0, 2.0])
            keys = tf.lookup.KeyValueTensorInitializer(["a"], tf.constant([1], tf.int64))
            self.table = tf.lookup.StaticHashTable(keys, 0)

        @tf.function(input_signature=[tf.TensorSpec([2], tf.float32)])
        def __call__(self, x: Any) -> Any:
            for _ in tf.range(3):
                if tf.reduce_sum(x) > 0:
                    x = x * self.weight
            return x

        @tf.function(input_signature=[tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.string)])
        def train(self, x: Any, key: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.weight * x)
            self.weight.assign_sub(tape.gradient(loss, self.weight))
            return self.table.lookup(key)

    om = Store(tmp_path / "store")
    tf.saved_model.save(Learns(), str(tmp_path / "saved"))
    om.models.put(tmp_path / "saved", "learns")
    again = om.models.get("learns")
    np.testing.assert_allclose(again([1.0, 1.0]), [1.0, 8.0])
    assert int(again.train([1.0, 1.0], "a")) == 1
