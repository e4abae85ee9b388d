"""Starts `main_fun` of resnet_cifar_dist.py on Spark's executors."""

import argparse

import resnet_cifar_dist
from pyspark.conf import SparkConf
from pyspark.context import SparkContext

from kindler.compat.tensorflowonspark import TFCluster

if __name__ == "__main__":
    sc = SparkContext(conf=SparkConf().setAppName("resnet_cifar"))
    executors = sc.getConf().get("spark.executor.instances", "1")

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cluster_size", type=int, default=int(executors), help="number of nodes")
    parser.add_argument("--num_ps", type=int, default=0, help="how many of them are parameter servers")
    parser.add_argument("--tensorboard", action="store_true", help="run TensorBoard beside the first node")
    parser.add_argument("--epochs", help="not needed: the program's own flag is --train_epochs")
    args, rem = parser.parse_known_args()

    cluster = TFCluster.run(
        sc,
        resnet_cifar_dist.main_fun,
        rem,
        args.cluster_size,
        args.num_ps,
        args.tensorboard,
        TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
    )
    cluster.shutdown()
    sc.stop()
