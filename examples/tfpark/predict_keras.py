"""TFPredictor.from_keras: the model of train_keras.py, over an RDD."""

import numpy as np
from mnist import folder, get_data_rdd, test_arrays

from kindler.compat import tensorflow as tf
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.pipeline.api.net import TFDataset
from kindler.compat.zoo.tfpark import TFPredictor

Model = tf.keras.models.Model
Dense, Flatten, Input = tf.keras.layers.Dense, tf.keras.layers.Flatten, tf.keras.layers.Input

sc = init_nncontext()

dataset = TFDataset.from_rdd(get_data_rdd("test", sc), features=(tf.float32, [28, 28, 1]), batch_per_thread=4)

data = Input(shape=[28, 28, 1])

x = Flatten()(data)
x = Dense(64, activation="relu")(x)
x = Dense(64, activation="relu")(x)
predictions = Dense(10, activation="softmax")(x)

model = Model(inputs=data, outputs=predictions)

model.load_weights(f"{folder}/mnist_keras.h5")

predictor = TFPredictor.from_keras(model, dataset)
predictions_rdd = predictor.predict()

images, labels = test_arrays()
scores = np.array(predictions_rdd.collect())
print("accuracy", np.mean(scores.argmax(axis=1) == labels))
print("difference from Keras", np.abs(scores - model.predict(images, batch_size=4)).max())
