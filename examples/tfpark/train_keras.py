"""TFOptimizer.from_keras: a Keras model over an RDD."""

from mnist import BATCH_SIZE, folder, get_data_rdd, max_epoch

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import MaxEpoch, TrainSummary
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.pipeline.api.net import TFDataset
from kindler.compat.zoo.tfpark import TFOptimizer

Model = tf.keras.models.Model
Dense, Flatten, Input = tf.keras.layers.Dense, tf.keras.layers.Flatten, tf.keras.layers.Input

sc = init_nncontext()

dataset = TFDataset.from_rdd(
    get_data_rdd("train", sc),
    features=(tf.float32, [28, 28, 1]),
    labels=(tf.int32, []),
    batch_size=BATCH_SIZE,
)

data = Input(shape=[28, 28, 1])

x = Flatten()(data)
x = Dense(64, activation="relu")(x)
x = Dense(64, activation="relu")(x)
predictions = Dense(10, activation="softmax")(x)

model = Model(inputs=data, outputs=predictions)

model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

optimizer = TFOptimizer.from_keras(keras_model=model, dataset=dataset)
optimizer.set_train_summary(TrainSummary(f"{folder}/az_lenet", "keras"))
optimizer.optimize(end_trigger=MaxEpoch(max_epoch))

model.save_weights(f"{folder}/mnist_keras.h5")
