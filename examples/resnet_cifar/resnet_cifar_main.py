"""Trains a ResNet on CIFAR-10: on one node, or on the nodes that TF_CONFIG names."""

from absl import app, flags
from resnet_cifar_train import define_cifar_flags, run


def main(_):
    run(flags.FLAGS)


if __name__ == "__main__":
    define_cifar_flags()
    app.run(main)
