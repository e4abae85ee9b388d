"""TFOptimizer.from_loss: slim's LeNet over an RDD, with summaries, and a checkpoint of tf.train.Saver."""

import lenet
from mnist import BATCH_SIZE, decode_to_ndarrays, file_list, folder, max_epoch, read_image_and_label

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import Adam, MaxEpoch, TrainSummary
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.pipeline.api.net import TFDataset
from kindler.compat.zoo.tfpark import TFOptimizer

sc = init_nncontext()

# Each record in the train_rdd consists of a list of NumPy ndrrays
train_rdd = (
    sc.parallelize(file_list("train"), 4)
    .map(lambda x: read_image_and_label(x))  # noqa: PLW0108
    .map(lambda image_label: decode_to_ndarrays(image_label))  # noqa: PLW0108
)

# TFDataset represents a distributed set of elements,
# in which each element contains one or more TensorFlow Tensor objects.
dataset = TFDataset.from_rdd(
    train_rdd, features=(tf.float32, [28, 28, 1]), labels=(tf.int32, []), batch_size=BATCH_SIZE
)

slim = tf.contrib.slim

images, labels = dataset.tensors
squeezed_labels = tf.squeeze(labels)
with slim.arg_scope(lenet.lenet_arg_scope()):
    logits, end_points = lenet.lenet(images, num_classes=10, is_training=True)

loss = tf.reduce_mean(tf.losses.sparse_softmax_cross_entropy(logits=logits, labels=squeezed_labels))

optimizer = TFOptimizer.from_loss(loss, Adam(1e-3))
summary = TrainSummary(f"{folder}/az_lenet", "lenet")
optimizer.set_train_summary(summary)
optimizer.optimize(end_trigger=MaxEpoch(max_epoch))

saver = tf.train.Saver()
saver.save(optimizer.sess, f"{folder}/lenet/model")

print("steps", len(summary.read_scalar("Loss")))
print("loss", summary.read_scalar("Loss")[-1, 1])
