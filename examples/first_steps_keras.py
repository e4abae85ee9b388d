import keras
from sklearn.datasets import load_digits

from kindler import Estimator


def make_model(config):
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10, activation="softmax")])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    digits = load_digits()
    data = {"x": (digits.data / 16).astype("float32"), "y": digits.target}
    estimator = Estimator.from_keras(model=make_model, workers=2)
    estimator.fit(data, epochs=8, batch_size=64, callbacks=[keras.callbacks.EarlyStopping("loss")])
    print(estimator.evaluate(data))  # {'loss': ..., 'accuracy': ..., 'num_samples': 1797}
