"""TFEstimator: a model function and an input function for train, evaluate and predict."""

import numpy as np
from mnist import arguments, folder, get_data_rdd, test_arrays

from kindler.compat import tensorflow as tf
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.tfpark import TFDataset
from kindler.compat.zoo.tfpark.estimator import TFEstimator, TFEstimatorSpec


def model_fn(features, labels, mode):
    features = tf.layers.flatten(features)

    hidden = tf.layers.dense(features, 32, activation=tf.nn.relu)

    logits = tf.layers.dense(hidden, 10)

    if mode == tf.estimator.ModeKeys.EVAL or mode == tf.estimator.ModeKeys.TRAIN:
        loss = tf.reduce_mean(tf.losses.sparse_softmax_cross_entropy(logits=logits, labels=labels))
        return TFEstimatorSpec(mode, predictions=logits, loss=loss)
    else:
        return TFEstimatorSpec(mode, predictions=logits)


sc = init_nncontext()


def input_fn(mode):
    if mode == tf.estimator.ModeKeys.TRAIN:
        training_rdd = get_data_rdd("train", sc)
        dataset = TFDataset.from_rdd(
            training_rdd, features=(tf.float32, [28, 28, 1]), labels=(tf.int32, []), batch_size=320
        )
    elif mode == tf.estimator.ModeKeys.EVAL:
        validation_rdd = get_data_rdd("validation", sc)
        dataset = TFDataset.from_rdd(
            validation_rdd, features=(tf.float32, [28, 28, 1]), labels=(tf.int32, []), batch_size=320
        )
    else:
        testing_rdd = get_data_rdd("test", sc)
        dataset = TFDataset.from_rdd(testing_rdd, features=(tf.float32, [28, 28, 1]), batch_per_thread=80)
    return dataset


estimator = TFEstimator(model_fn, tf.train.AdamOptimizer(), model_dir=f"{folder}/estimator")
estimator.train(input_fn, steps=arguments.steps)
evaluation_result = estimator.evaluate(input_fn, ["acc"])
predictions = estimator.predict(input_fn)

_, labels = test_arrays()
scores = np.array(predictions.collect())
print("checkpoint", estimator.latest_checkpoint())
print("accuracy", evaluation_result["acc"])
print("accuracy of predictions", np.mean(scores.argmax(axis=1) == labels))
