"""KerasModel: train a Keras model over an RDD, save its weights, evaluate and predict."""

import numpy as np
from mnist import BATCH_SIZE, folder, get_data_rdd, max_epoch, test_arrays

from kindler.compat import tensorflow as tf
from kindler.compat.zoo import init_nncontext
from kindler.compat.zoo.tfpark import KerasModel, TFDataset

sc = init_nncontext()

training_dataset = TFDataset.from_rdd(
    get_data_rdd("train", sc),
    features=(tf.float32, [28, 28, 1]),
    labels=(tf.int32, []),
    batch_size=BATCH_SIZE,
)
eval_dataset = TFDataset.from_rdd(
    get_data_rdd("validation", sc),
    features=(tf.float32, [28, 28, 1]),
    labels=(tf.int32, []),
    batch_per_thread=80,
)
pred_dataset = TFDataset.from_rdd(
    get_data_rdd("test", sc), features=(tf.float32, [28, 28, 1]), batch_per_thread=80
)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Flatten(input_shape=(28, 28, 1)),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

model.compile(
    optimizer=tf.keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
)
keras_model = KerasModel(model)

keras_model.fit(training_dataset, epochs=max_epoch)

model.save_weights(f"{folder}/model.h5")

model.load_weights(f"{folder}/model.h5")

evaluation_results = keras_model.evaluate(eval_dataset)

predictions = keras_model.predict(pred_dataset)

images, labels = test_arrays()
scores = np.array(predictions.collect())
print("accuracy", evaluation_results["acc"])
print("accuracy of predictions", np.mean(scores.argmax(axis=1) == labels))
print("difference from Keras", np.abs(scores - model.predict(images, batch_size=80)).max())
