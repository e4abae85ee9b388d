"""No Spark and no Java: numpy arrays in, worker processes on this machine, numpy arrays out."""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torchmetrics.classification import BinaryAUROC

import kindler


def main(epochs=10):
    # --8<-- [start:arrays]
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)

    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.BCEWithLogitsLoss(),
        metrics={"accuracy": "accuracy", "auc": BinaryAUROC()},
        workers=2,
    )
    estimator.fit((x_train, y_train), epochs=epochs, batch_size=32)
    result = estimator.evaluate((x_test, y_test))
    scores = estimator.predict(x_test)  # an array, like the input
    # --8<-- [end:arrays]

    print(f"accuracy {result['accuracy']:.3f}, AUC {result['auc']:.3f}")
    print("first scores:", np.round(scores[:4], 2), "labels:", y_test[:4])
    return result["accuracy"]


if __name__ == "__main__":
    main()
