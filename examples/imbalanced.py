"""A rare class in a table: class weights make the model find it, and AUC measures how well it ranks rows.

python examples/imbalanced.py
"""

import argparse

import pandas as pd
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch import nn

from kindler import Columns, Estimator


# --8<-- [start:data]
def frames(rows):
    """Training and test rows, 3% of which belong to the class of interest."""
    x, y = make_classification(
        rows, n_features=12, n_informative=6, weights=[0.97], class_sep=1.2, flip_y=0.002, random_state=0
    )
    table = pd.DataFrame(x.astype("float32"), columns=[f"f{number}" for number in range(12)])
    table["rare"] = y.astype("float32")
    return train_test_split(table, test_size=0.3, stratify=table["rare"], random_state=0)


# --8<-- [end:data]
# --8<-- [start:model]
def new_estimator():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["auc", "precision", "recall", "f1"],
        workers=2,
    )


# --8<-- [end:model]


def main(rows=20_000, epochs=5):
    train, test = frames(rows)
    features = [name for name in train if name != "rare"]
    # --8<-- [start:weights]
    share = train["rare"].mean()
    balanced = {0: 0.5 / (1 - share), 1: 0.5 / share}  # both classes weigh the same
    for title, weights in (("plain", None), ("weighted", balanced)):
        estimator = new_estimator()
        estimator.fit(
            train,
            epochs=epochs,
            batch_size=256,
            feature_cols=features,
            label_cols="rare",
            columns=Columns(stack_features=True, class_weight=weights),
            verbose=0,
        )
        result = estimator.evaluate(test, verbose=0)
        print(title, {name: round(result[name], 3) for name in ("auc", "precision", "recall", "f1")})
    # --8<-- [end:weights]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    main(options.rows, options.epochs)
