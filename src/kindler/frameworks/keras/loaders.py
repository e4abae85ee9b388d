"""`tf.data` and indexed Keras datasets on several ranks.

TensorFlow itself shards a `tf.data.Dataset`: by file if there are enough, else by batch, and not at all if
its options say so. Made on the driver, it travels as its graph.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from kindler.errors import ConfigError
from kindler.frameworks.keras.dataset import with_own_threads
from kindler.frameworks.loaders import LoaderSharding, LoaderStream, cannot_travel
from kindler.frameworks.loaders import pickled as pickled

_HOST_CODE = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})
_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset")


def pack_dataset(dataset: Any) -> Callable[[], Any]:
    import tensorflow as tf

    try:
        graph = _graph_of(tf, dataset._variant_tensor)
        spec = pickle.dumps(dataset.element_spec)
    except (tf.errors.OpError, pickle.PicklingError, TypeError, AttributeError) as exc:
        raise ConfigError(cannot_travel(dataset, str(exc).partition("\n")[0])) from exc
    parsed = tf.compat.v1.GraphDef.FromString(graph)
    found = sorted({node.op for node in _nodes(parsed)} & _HOST_CODE)
    if found:
        raise ConfigError(cannot_travel(dataset, f"it calls Python code ({', '.join(found)})"))
    policy = int(dataset.options().experimental_distribute.auto_shard_policy)
    _seed_shuffles(tf, parsed)
    return partial(unpack_dataset, parsed.SerializeToString(), spec, policy)


def _graph_of(tf: Any, variant: Any) -> bytes:
    """In TensorFlow 1 programs the dataset is a tensor that a session must evaluate."""
    in_graph = isinstance(getattr(variant, "graph", None), tf.Graph) and not hasattr(variant, "numpy")
    with variant.graph.as_default() if in_graph else nullcontext():
        packed = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        )
        if not in_graph:
            return bytes(packed.numpy())
        with tf.compat.v1.Session(graph=variant.graph) as session:
            return bytes(session.run(packed))


def unpack_dataset(graph: bytes, spec: bytes, policy: int) -> Any:
    """`spec` is a pickle, so it must come from our own channel."""
    import tensorflow as tf
    from tensorflow.python.data.ops.dataset_ops import _VariantDataset

    dataset = _VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), pickle.loads(spec))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy(policy)
    return dataset.with_options(options)


class DatasetStream(LoaderStream):
    fresh = True

    def __init__(self, made: Any, sharding: LoaderSharding) -> None:
        import tensorflow as tf

        super().__init__(made, sharding)
        off = tf.data.experimental.AutoShardPolicy.OFF
        if made.options().experimental_distribute.auto_shard_policy == off:
            self.cut, self._takes_all = False, True
        shards = sharding.size > 1 and not self._takes_all
        self._dataset = with_own_threads(_sharded(tf, made, sharding) if shards else made)

    def length(self) -> float | None:
        cardinality = int(self._dataset.cardinality())
        return math.inf if cardinality == -1 else None if cardinality < 0 else cardinality

    def batches(self, number: int) -> Generator[Any, None, None]:
        import tensorflow as tf

        with tf.init_scope():  # Keras asks from within a graph of its own
            items = iter(self._dataset)
        while True:
            try:
                with tf.init_scope():
                    batch = next(items)
            except StopIteration:
                return
            yield batch


class IndexedStream(LoaderStream):
    def length(self) -> float | None:
        length = self._count()
        return math.inf if length is None else self._share_of(length)

    def batches(self, number: int) -> Generator[Any, None, None]:
        count, drawing = self._count(), self._sharding.drawing(number)
        with drawing:
            getattr(self._made, "on_epoch_begin", lambda: None)()
        first, every = (0, 1) if self._takes_all else (self._sharding.rank, self._sharding.size)
        for place in itertools.count(first, every):
            if count is not None and place >= count:
                break
            yield self._made[place]
        with drawing:  # where such a dataset shuffles, for the next pass
            getattr(self._made, "on_epoch_end", lambda: None)()

    def _count(self) -> int | None:
        if hasattr(self._made, "num_batches"):
            count: int | None = self._made.num_batches
            return count
        return len(self._made)


def _sharded(tf: Any, dataset: Any, sharding: LoaderSharding) -> Any:
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

    if sharding.unit == "batches":
        return dataset.shard(sharding.size, sharding.rank)
    auto = tf.data.experimental.AutoShardPolicy.AUTO
    if dataset.options().experimental_distribute.auto_shard_policy == auto:
        # With fewer files than ranks it is the first rank's part that complains, and all must decide alike.
        try:
            next(iter(_AutoShardDataset(dataset, sharding.size, 0)), None)
        except tf.errors.InvalidArgumentError:
            return dataset.shard(sharding.size, sharding.rank)
    return _AutoShardDataset(dataset, sharding.size, sharding.rank)


def _nodes(graph: Any) -> Iterator[Any]:
    return itertools.chain(graph.node, *(function.node_def for function in graph.library.function))


def _seed_shuffles(tf: Any, graph: Any) -> None:
    """Seed unseeded shuffles: all ranks must see the same order to take their parts of it."""
    bodies = [(graph.node, ""), *((function.node_def, ":output:0") for function in graph.library.function)]
    for nodes, output in bodies:
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for place, node in enumerate([node for node in nodes if node.op.startswith(_SHUFFLES)]):
            names = [name.partition(":")[0] for name in node.input[2:4]]
            seeds = [constants[name] for name in names if name in constants]
            if len(seeds) < 2 or any(int(tf.make_ndarray(seed.attr["value"].tensor)) for seed in seeds):
                continue
            for number, seed in enumerate(seeds):
                fresh = nodes.add()
                fresh.CopyFrom(seed)
                fresh.name = f"kindler_seed_{place}_{number}"
                fresh.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(place + 1, dtype=tf.int64))
                node.input[2 + number] = fresh.name + output
