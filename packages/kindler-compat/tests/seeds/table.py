"""Every code block of the five pages: what changes in it, and the test that runs it.

Import lines change. Besides them a block changes only where `Change` says so and why:

- "path": a file or an address of the author's machine.
- "size": fewer steps or smaller images, unless `KINDLER_TEST_WHOLE=1` runs the whole of it.
- "slip": a line of the page that no Python or TensorFlow would have run.
- "download": what would be fetched from the network.

What a test puts into a program besides is in `given`, name by name: what the page leaves to its reader. A
program that is given anything else does not run.

`docs/migration/blocks.md` is made of this table: `python -m tests.seeds.page`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GIVEN", "PAGES", "ROWS", "Change", "Row"]

PAGES = {
    "omegaml": "omega|ml: TensorFlow",
    "orca": "Orca: distributed training and inference",
    "sparkflow": "SparkFlow: README",
    "tensorflowonspark-resnet": "TensorFlowOnSpark: ResNet image classification",
    "tfpark": "Analytics Zoo: TFPark",
}


@dataclass(frozen=True)
class Change:
    """A piece of a block, what stands there when it runs, and why."""

    was: str
    now: str
    kind: Literal["path", "size", "slip", "download"]
    why: str


@dataclass(frozen=True)
class Row:
    """A block.

    Attributes:
        block: The page and the block's name in `blocks/`.
        test: The test that runs it.
        imports: Import lines, old and new. One that is not in the block is the reader's own: the page shows
            none for a name that it uses.
        changes: What else changes.
        given: What it uses that no block makes, separated by spaces: names, variables of a shell, files. Each
            is in `GIVEN`, or with its block's name before it where it is something else there.
    """

    block: str
    test: str
    imports: tuple[tuple[str, str], ...] = ()
    changes: tuple[Change, ...] = ()
    given: str = ""

    @property
    def given_names(self) -> tuple[str, ...]:
        return tuple(self.given.split())

    def what(self, name: str) -> str:
        """What is given by a name."""
        return GIVEN.get(f"{self.block}:{name}") or GIVEN[name]

    @property
    def shell(self) -> bool:
        """Whether it is of a shell; its import lines are those of the program that it starts."""
        return self.block.startswith("tensorflowonspark-resnet/")


def _new_prefix(*lines: str) -> tuple[tuple[str, str], ...]:
    """Import lines to which nothing happens but that `kindler.compat.` is put before the package."""
    return tuple((line, line.replace("from ", "from kindler.compat.", 1)) for line in lines)


GIVEN = {
    "BATCH_SIZE": "64",
    "CIFAR_DATA": "the folder of CIFAR-10, as in the block before",
    "LeNet": "a network with two convolutions",
    "PYTHONPATH": "Kindler's folder src",
    "SPARK_HOME": "Spark of pip, with the scripts that start and stop a master and workers",
    "TENSORFLOW_MODELS": "the folder of the program, as in the block before",
    "accuracy": "the share of rows whose largest output is the label's",
    "args": "a learning rate and a number of epochs",
    "batch_size": "32",
    "create_keras_lenet_model": "a network with two convolutions",
    "data_ndarray": "pictures",
    "decode_to_ndarrays": "pictures between 0 and 1, labels as integers",
    "df": "a DataFrame of pictures and labels",
    "ds": "batches of pictures and labels",
    "eval_dataset": "a TFDataset of pictures and labels",
    "file_list": "the pictures to train on, by number",
    "get_data_rdd": "an RDD of pictures and labels",
    "keras": "from tensorflow import keras",
    "label_names": "three names",
    "label_ndarray": "their labels",
    "lenet": "examples/tfpark/lenet.py, which has the network of slim's model zoo",
    "max_epoch": "a few epochs",
    "mnist_train": "what the block itself makes as `dataset`",
    "nn": "from torch import nn",
    "np": "import numpy as np",
    "orca/torch-creators:model": "a LeNet(): the page passes one beside the creator of its optimizer",
    "plt": "import matplotlib.pyplot as plt",
    "pred_dataset": "a TFDataset of pictures",
    "predict_url": "the address of a server",
    "preprocess": "pictures between 0 and 1, labels as integers",
    "read_image_and_label": "a picture and its label",
    "requests": "import requests",
    "resnet_cifar_dist.py": "of examples/resnet_cifar; TensorFlowOnSpark's needs tensorflow/models",
    "resnet_cifar_main.py": "of examples/resnet_cifar, in place of that of tensorflow/models",
    "resnet_cifar_spark.py": "of examples/resnet_cifar, with its import line changed",
    "spark": "a session",
    "sparkflow/save:df": "a few of the rows to train on",
    "sparkflow/transform:df": "the rows to test with",
    "tf": "import tensorflow as tf",
    "tfds": "`tfds.load`, which would download; it gives the same kind of data set",
    "tfpark/keras-predict:model": "`keras_model`: the page calls both of them model",
    "tfpark/predict-data:file_list": "the pictures to test with",
    "torch": "import torch",
    "total_size": "the number of rows",
    "train_loader": "a DataLoader",
    "train_loader_func": "a function that makes a DataLoader",
    "training_dataset": "the TFDataset of the block before",
    "xshards": "XShards of pictures",
}

_TMP = Change("/tmp/", "<folder>/", "path", "a folder of the test's own")

_OM = (("import omegaml as om", "import kindler.compat.omegaml as om"),)
_IMAGE = Change("/path/to/image", "<image>", "path", "an image that is there")
_SIDE = Change("192, 192", "96, 96", "size", "smaller images")
_OMEGAML = (
    "tests/keras_faces/test_omegaml_programs.py"
    "::test_an_image_gets_the_same_prediction_here_on_the_runtime_and_over_http"
)

_TF1 = ("import tensorflow as tf", "from kindler.compat import tensorflow as tf")
_KERAS1 = ("from tensorflow import keras", "from kindler.compat.tensorflow import keras")
_ORCA_TF1 = "tests/seeds_graphs/test_orca.py::test_a_graph_and_a_keras_model_learn_digits"
_ORCA_TF2 = "tests/seeds/test_orca_tf2.py::test_a_model_creator_learns_digits_that_a_data_creator_reads"
_ORCA_TORCH = "tests/seeds/test_orca.py::test_torch_models_learn_digits_with_instances_and_with_creators"
_ORCA_MXNET = "tests/seeds/test_orca.py::test_a_block_of_mxnet_learns_digits"
_ORCA_BIGDL = "tests/seeds/test_orca.py::test_a_bigdl_model_is_trained_and_scores_a_parquet_file"
_ORCA_OPENVINO = "tests/seeds/test_orca.py::test_an_openvino_model_scores_arrays_and_shards"
_FROM_TORCH = _new_prefix("from zoo.orca.learn.pytorch import Estimator")
_MX = (
    ("import mxnet as mx", "import kindler.compat.mxnet as mx"),
    ("from mxnet import gluon", "from kindler.compat.mxnet import gluon"),
)

_SPARKFLOW = (
    "tests/seeds_graphs/test_sparkflow.py::test_the_readme_learns_digits_and_its_pipeline_is_read_again"
)
_PARAMETERS = (
    "tests/seeds_graphs/test_sparkflow.py::test_every_parameter_of_the_readme_is_a_param_of_the_stage"
)
_BUILD_GRAPH = _new_prefix("from sparkflow.graph_utils import build_graph")

_RESNET = "tests/seeds/test_tensorflowonspark.py"
_CIFAR = Change("/path/to/cifar", "<cifar>", "path", "the folder of CIFAR-10")
_FEW_LAYERS = "--resnet_size=8 --batch_size=40"
_SMALL = Change("--train_epochs=1", f"--train_epochs=1 {_FEW_LAYERS}", "size", "a smaller network")

_TFPARK = "tests/seeds_graphs/test_tfpark.py"
_KERAS_MODEL = f"{_TFPARK}::test_a_keras_model_learns_digits_and_its_weights_are_read_again"
_ESTIMATOR = f"{_TFPARK}::test_a_model_function_learns_digits_from_an_input_function"
_LENET = f"{_TFPARK}::test_lenet_of_slim_learns_digits_and_its_checkpoint_is_read_again"
_LOW_KERAS = f"{_TFPARK}::test_a_keras_model_learns_digits_below_the_estimators"
_NO_SUCH_IMPORT = ("from tensorflow as tf", "from kindler.compat import tensorflow as tf")
_DATASET = (
    *_new_prefix("from zoo import init_nncontext", "from zoo.pipeline.api.net import TFDataset"),
    _NO_SUCH_IMPORT,
)
_CONTINUED = tuple(
    Change(line, f"{line} \\", "slip", "the expression goes on in the next line, without parentheses")
    for line in ("sc.parallelize(file_list)", "  .map(lambda x: read_image_and_label(x))")
)
_KERAS_LAYERS = (
    ("from tensorflow.keras.models import Model", "from kindler.compat.tensorflow.keras.models import Model"),
    ("from tensorflow.keras.layers import *", "from kindler.compat.tensorflow.keras.layers import *"),
)
_PREDICTOR = _new_prefix("from zoo.tfpark import TFPredictor")


_LIST = [
    Row("omegaml/train", _OMEGAML, _OM, (
        _SIDE,
        Change("include_top=False", "include_top=False, weights=None, alpha=<alpha>", "download",
               "weights of ImageNet are downloaded"),
    ),
        given="ds label_names tf"),
    Row("omegaml/put", _OMEGAML, _OM),
    Row("omegaml/predict-here", _OMEGAML, _OM, (_IMAGE,),
        given="np plt"),
    Row("omegaml/predict-on-the-runtime", _OMEGAML, _OM, (_IMAGE,),
        given="np plt"),
    Row("omegaml/predict-over-rest", _OMEGAML, (), (_SIDE,),
        given="predict_url requests"),

    Row("orca/tf1-from-graph", _ORCA_TF1, (
        _TF1, *_new_prefix("from zoo.orca.learn.tf.estimator import Estimator")),
        given="accuracy lenet"),
    Row("orca/tf1-from-keras", _ORCA_TF1, (
        _KERAS1, *_new_prefix("from zoo.orca.learn.tf.estimator import Estimator")),
        given="create_keras_lenet_model"),
    Row("orca/tf1-fit", _ORCA_TF1,
        given="df max_epoch mnist_train preprocess tfds"),
    Row("orca/tf2-from-keras", _ORCA_TF2, _new_prefix("from zoo.orca.learn.tf2 import Estimator"),
        given="create_keras_lenet_model keras"),
    Row("orca/tf2-fit", _ORCA_TF2,
        given="batch_size df max_epoch preprocess tfds total_size"),
    Row("orca/torch-from-torch", _ORCA_TORCH, _FROM_TORCH,
        given="LeNet args nn torch"),
    Row("orca/torch-fit", _ORCA_TORCH,
        given="args train_loader xshards"),
    Row("orca/torch-creators", _ORCA_TORCH, _FROM_TORCH,
        given="LeNet model nn torch"),
    Row("orca/torch-creators-fit", _ORCA_TORCH,
        given="args df train_loader_func"),
    Row("orca/mxnet-from-mxnet", _ORCA_MXNET, (
        *_MX, *_new_prefix("from zoo.orca.learn.mxnet import Estimator, create_config")), (
        Change("optimizer_params={'learning_rate': 0.02})",
               "optimizer_params={'learning_rate': 0.02})\nconfig['batch_size'] = 16", "slip",
               "the data iterator of the next block reads it, and nothing sets it"),
        ), given="LeNet"),
    Row("orca/mxnet-fit", _ORCA_MXNET,
        given="data_ndarray label_ndarray"),
    Row("orca/bigdl-from-bigdl", _ORCA_BIGDL, _new_prefix(
        "from bigdl.nn.criterion import *",
        "from bigdl.nn.layer import *",
        "from bigdl.optim.optimizer import *",
        "from zoo.orca.learn.bigdl import Estimator",
    )),
    Row("orca/bigdl-fit", _ORCA_BIGDL,
        given="spark"),
    Row("orca/openvino-from-openvino", _ORCA_OPENVINO,
        _new_prefix("from zoo.orca.learn.openvino import Estimator"),
        (Change("The/file_path/to/the/OpenVINO_IR_xml_file", "<model>", "path", "a model that is there"),)),
    Row("orca/openvino-predict", _ORCA_OPENVINO, _new_prefix("from zoo.orca.data import XShards"),
        given="np"),

    Row("sparkflow/mnist", _SPARKFLOW, _new_prefix(
        "from sparkflow.graph_utils import build_graph",
        "from sparkflow.tensorflow_async import SparkAsyncDL",
    ),
        given="spark"),
    Row("sparkflow/save", _SPARKFLOW,
        given="df"),
    Row("sparkflow/load", _SPARKFLOW, _new_prefix(
        "from sparkflow.pipeline_util import PysparkPipelineWrapper")),
    Row("sparkflow/transform", _SPARKFLOW,
        given="df"),
    Row("sparkflow/graph", _SPARKFLOW),
    Row("sparkflow/build-graph", _SPARKFLOW, _BUILD_GRAPH),
    Row("sparkflow/parameters", _PARAMETERS),

    Row("tensorflowonspark-resnet/single-node", f"{_RESNET}::test_one_process_trains", (), (
        Change("/path/to/tensorflow/models", "<models>", "path", "the folder of the program"),
        _CIFAR, _SMALL,
    ),
        given="PYTHONPATH resnet_cifar_main.py"),
    Row("tensorflowonspark-resnet/two-processes",
        f"{_RESNET}::test_two_processes_find_each_other_and_train_in_step", (), (
        Change("localhost:2222", "<first>", "path", "a port that is free"),
        Change("localhost:2223", "<second>", "path", "a port that is free"),
        _SMALL,
    ),
        given="CIFAR_DATA PYTHONPATH TENSORFLOW_MODELS resnet_cifar_main.py"),
    Row("tensorflowonspark-resnet/spark", f"{_RESNET}::test_two_executors_of_spark_train_in_step",
        _new_prefix("from tensorflowonspark import TFCluster"), (
        Change("/path/to/TensorFlowOnSpark", "<tfos>", "path", "the folder of examples/resnet"),
        Change("/Users/leewyang/datasets/cifar10/cifar-10-batches-bin", "<cifar>", "path",
               "the folder of CIFAR-10"),
        Change("$(hostname):7077", "<master>", "path", "an address of this machine, and a port that is free"),
        Change("--train_epochs 1", f"--train_epochs 1 {_FEW_LAYERS}", "size", "a smaller network"),
    ),
        given="PYTHONPATH SPARK_HOME TENSORFLOW_MODELS resnet_cifar_dist.py resnet_cifar_spark.py"),

    Row("tfpark/dataset", _KERAS_MODEL, _DATASET, _CONTINUED,
        given="BATCH_SIZE decode_to_ndarrays file_list read_image_and_label"),
    Row("tfpark/keras-model", _KERAS_MODEL, (
        _TF1, *_new_prefix("from zoo.tfpark import KerasModel, TFDataset"))),
    Row("tfpark/keras-fit", _KERAS_MODEL, (), (_TMP,),
        given="max_epoch training_dataset"),
    Row("tfpark/keras-predict", _KERAS_MODEL, (), (_TMP,),
        given="eval_dataset model pred_dataset"),
    Row("tfpark/model-fn", _ESTIMATOR, (
        _TF1, *_new_prefix("from zoo.tfpark.estimator import TFEstimator, TFEstimatorSpec"),
        ), (
        Change("    hidden = ", "    features = tf.layers.flatten(features)\n    hidden = ", "slip",
               "labels have one axis, features of 28 x 28 x 1 would give outputs of four"),
    )),
    Row("tfpark/input-fn", _ESTIMATOR, (
        _TF1, *_new_prefix("from zoo import init_nncontext", "from zoo.tfpark import TFDataset"),
        ), (
        Change('get_data_rdd("validation", sc)\n        dataset = TFDataset.from_rdd(testing_rdd,',
               'get_data_rdd("validation", sc)\n        dataset = TFDataset.from_rdd(validation_rdd,',
               "slip", "testing_rdd has no value there"),
    ),
        given="get_data_rdd"),
    Row("tfpark/estimator", _ESTIMATOR, (), (
        _TMP,
        Change("steps=10000", "steps=60", "size", "fewer steps"),
    )),
    Row("tfpark/train-data", _LENET, _DATASET, _CONTINUED,
        given="BATCH_SIZE decode_to_ndarrays file_list read_image_and_label"),
    Row("tfpark/train-lenet", _LENET, (_TF1,),
        given="lenet"),
    Row("tfpark/train-keras", _LOW_KERAS, _KERAS_LAYERS),
    Row("tfpark/optimize-loss", _LENET, _new_prefix(
        "from zoo.tfpark import TFOptimizer",
        "from bigdl.optim.optimizer import MaxIteration, Adam, MaxEpoch, TrainSummary",
    ), (_TMP,)),
    Row("tfpark/optimize-keras", _LOW_KERAS, _new_prefix(
        "from zoo.tfpark import TFOptimizer",
        "from bigdl.optim.optimizer import MaxIteration, MaxEpoch, TrainSummary",
    ), (_TMP,)),
    Row("tfpark/save-checkpoint", _LENET, (), (_TMP,)),
    Row("tfpark/save-weights", _LOW_KERAS, (), (_TMP,)),
    Row("tfpark/predict-data", _LENET, _DATASET, _CONTINUED,
        given="decode_to_ndarrays file_list read_image_and_label"),
    Row("tfpark/predict-lenet", _LENET, (_TF1,), (
        Change('"/tmp/lenet"', '"/tmp/lenet/"', "slip", 'the checkpoint was saved as "/tmp/lenet/"'),
        _TMP,
        ),
        given="lenet"),
    Row("tfpark/predict-keras", _LOW_KERAS, _KERAS_LAYERS, (
        Change("/tmp/mnist_keras.h5", "/tmp/keras.h5", "slip", "the weights were saved as /tmp/keras.h5"),
        _TMP,
    )),
    Row("tfpark/predictor", _LENET, _PREDICTOR),
    Row("tfpark/predictor-keras", _LOW_KERAS, _PREDICTOR),
]  # fmt: skip

ROWS = {row.block: row for row in _LIST}
