"""The same as a cluster program: `main(_)` has become `main_fun(argv, ctx)`."""

import tensorflow as tf
from absl import flags
from resnet_cifar_train import define_cifar_flags, run


def main_fun(argv, ctx):
    tf.get_logger().setLevel("ERROR")
    define_cifar_flags()
    flags.FLAGS([__name__, *argv])
    return run(flags.FLAGS, export=ctx.export_saved_model)
