"""From a Spark DataFrame to a trained digit classifier and back: run with `make quickstart`.

Two workers train a small network on scikit-learn's digits, 1,797 images of 8 x 8 pixels. The program prints
the accuracy on images that were not used for training, scores them, and saves a plot of the training.
"""

import argparse
from pathlib import Path

import pandas as pd
from pyspark.sql import functions as F
from sklearn.datasets import load_digits
from torch import nn, optim

import kindler


# --8<-- [start:data]
def digits_frame(spark):
    """The digits as a DataFrame: `features`, 64 numbers from 0 to 1, and `label`, 0 to 9."""
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    return spark.createDataFrame(pd.DataFrame({"features": list(images), "label": digits.target}))


# --8<-- [end:data]


# --8<-- [start:model]
def make_model(config):
    """Called on every worker; all start from the weights of the first."""
    return nn.Sequential(
        nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Dropout(0.2), nn.Linear(config["hidden"], 10)
    )


def make_optimizer(model, config):
    return optim.Adam(model.parameters(), lr=config["lr"])


# --8<-- [end:model]


def main(epochs: int = 15, plot: str | Path = "quickstart.png") -> float:
    """Train, score and plot; returns the accuracy on the test rows."""
    # --8<-- [start:split]
    spark = kindler.init(cores=2)  # Spark on this machine, two tasks at a time
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=7)
    # --8<-- [end:split]

    # --8<-- [start:fit]
    estimator = kindler.Estimator.from_torch(
        model=make_model,
        optimizer=make_optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        config={"hidden": 128, "lr": 3e-3},
        workers=2,
    )
    # batch_size counts the rows of both workers together.
    history = estimator.fit(train, epochs=epochs, batch_size=64, validation_data=test)
    # --8<-- [end:fit]

    # --8<-- [start:evaluate]
    result = estimator.evaluate(test, verbose=0)
    print(f"\ntest accuracy: {result['accuracy']:.4f} on {result['num_samples']} images")
    # --8<-- [end:evaluate]

    # --8<-- [start:predict]
    # `prediction` holds the ten scores of a row; the position of the highest is the digit.
    scored = estimator.predict(test)
    digit = F.expr("array_position(prediction, array_max(prediction)) - 1")
    scored.select("label", digit.alias("predicted"), "prediction").show(5, truncate=60)
    # --8<-- [end:predict]

    # --8<-- [start:plot]
    path = Path(plot).absolute()
    history.plot(path)
    print(f"plot: {path}")
    # --8<-- [end:plot]

    kindler.stop()
    return result["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--plot", default="quickstart.png", help="where to save the plot")
    options = parser.parse_args()
    main(options.epochs, options.plot)
