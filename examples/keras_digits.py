"""A Keras model on a Spark DataFrame, with Keras's own callbacks: `python keras_digits.py --backend jax`.

Two workers train on scikit-learn's digits and stop when the validation loss stops falling. The saved model
is an ordinary `.keras` file.
"""

import argparse
import os
from pathlib import Path


def make_model(config):
    """Called on every worker: a compiled Keras model."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(config["filters"], 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main(backend: str, epochs: int, folder: Path) -> None:
    os.environ["KERAS_BACKEND"] = backend  # before Keras is imported, here and in the workers
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np
    import pandas as pd
    from sklearn.datasets import load_digits

    import kindler

    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    spark = kindler.init(cores=2)
    frame = spark.createDataFrame(pd.DataFrame({"features": list(images), "label": digits.target}))
    train, held_out, test = frame.randomSplit([0.7, 0.15, 0.15], seed=7)

    estimator = kindler.Estimator.from_keras(model=make_model, config={"filters": 16}, workers=2)
    history = estimator.fit(
        train,
        epochs=epochs,
        batch_size=64,
        validation_data=held_out,
        callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)],
        checkpoint=folder / "checkpoints",
    )
    print(f"epochs: {len(history)}")
    print(f"test accuracy: {estimator.evaluate(test, verbose=0)['accuracy']:.4f}")

    saved = folder / "digits.keras"
    estimator.save(saved)
    plain = keras.saving.load_model(saved)  # using it does not need Kindler
    ours = estimator.predict({"features": images[:5]}, verbose=0)["prediction"]
    same = np.allclose(plain.predict(images[:5], verbose=0), ours, atol=1e-5)
    print(f"plain Keras predicts the same: {same}")
    kindler.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="tensorflow", choices=["tensorflow", "jax", "torch"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("keras-digits"))
    given = parser.parse_args()
    main(given.backend, given.epochs, given.folder)
