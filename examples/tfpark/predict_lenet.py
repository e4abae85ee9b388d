"""TFPredictor.from_outputs: LeNet again, with the checkpoint of train_lenet.py, over an RDD."""

import lenet
import numpy as np
from mnist import decode_to_ndarrays, file_list, folder, read_image_and_label, test_arrays

from kindler.compat import tensorflow as tf
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.pipeline.api.net import TFDataset
from kindler.compat.zoo.tfpark import TFPredictor

sc = init_nncontext()

# Each record in the train_rdd consists of a list of NumPy ndrrays
testing_rdd = (
    sc.parallelize(file_list("test"), 4)
    .map(lambda x: read_image_and_label(x))  # noqa: PLW0108
    .map(lambda image_label: decode_to_ndarrays(image_label))  # noqa: PLW0108
)

# TFDataset represents a distributed set of elements,
# in which each element contains one or more TensorFlow Tensor objects.
dataset = TFDataset.from_rdd(testing_rdd, features=(tf.float32, [28, 28, 1]), batch_per_thread=4)

slim = tf.contrib.slim

images, labels = dataset.tensors
with slim.arg_scope(lenet.lenet_arg_scope()):
    logits, end_points = lenet.lenet(images, num_classes=10, is_training=False)

sess = tf.Session()
saver = tf.train.Saver()
saver.restore(sess, f"{folder}/lenet/model")

predictor = TFPredictor.from_outputs(sess, [logits])
predictions_rdd = predictor.predict()

arrays, truth = test_arrays()
scores = np.array(predictions_rdd.collect())
plain = [sess.run(logits, {images: arrays[start : start + 4]}) for start in range(0, len(arrays), 4)]
print("accuracy", np.mean(scores.argmax(axis=1) == truth))
print("difference from a session", np.abs(scores - np.concatenate(plain)).max())
