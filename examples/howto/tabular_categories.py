"""A table with categories and numbers: index, scale, embed, train, and score rows with unseen values.

    python examples/howto/tabular_categories.py

The bookings are synthetic: whether one is cancelled depends on its city, its channel, the price and how far
ahead it was made.
"""

import json

import numpy as np
import pandas as pd
import torch
from torch import nn

import kindler
from kindler.features import StandardScaler, StringIndexer

CATEGORIES = ["city", "channel"]
NUMBERS = ["price", "days_ahead"]


def bookings(rows, seed):
    draw = np.random.default_rng(seed)
    effect = np.random.default_rng(99).normal(0, 1.5, 50)  # per city, the same in all tables
    city, channel = draw.integers(0, 50, rows), draw.integers(0, 3, rows)
    price, days = draw.lognormal(4, 0.5, rows), draw.integers(0, 180, rows)
    score = effect[city] + np.array([0.0, 1.0, -1.0])[channel] + days / 60 - price / 60 - 0.5
    return pd.DataFrame(
        {
            "city": [f"city-{number}" for number in city],
            "channel": np.array(["web", "phone", "agent"])[channel],
            "price": price,
            "days_ahead": days,
            "cancelled": (draw.logistic(size=rows) < score).astype("float32"),
        }
    )


class Tabular(nn.Module):
    """An embedding for each category, next to the numbers, and two layers on top."""

    def __init__(self, sizes, numbers):
        super().__init__()
        # One extra index, which all values share that were not seen in training.
        self.embed = nn.ModuleList(nn.Embedding(size + 1, min(16, 1 + size // 2)) for size in sizes)
        width = sum(one.embedding_dim for one in self.embed) + numbers
        self.layers = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, city, channel, numbers):
        parts = [embed(column) for embed, column in zip(self.embed, (city, channel), strict=True)]
        return self.layers(torch.cat([*parts, numbers], dim=1))[:, 0]


def main():
    spark = kindler.init(cores=2)
    train, test = (spark.createDataFrame(bookings(*each)) for each in ((8000, 0), (2000, 1)))

    # Spark learns these from the training rows; `transform` is plain SQL.
    indexer = StringIndexer(CATEGORIES, ["city_id", "channel_id"], handle_invalid="keep").fit(train)
    scaler = StandardScaler(True, True, NUMBERS, "numbers").fit(train)
    train, test = (scaler.transform(indexer.transform(frame)) for frame in (train, test))
    sizes = [len(indexer.labels_[name]) for name in CATEGORIES]

    torch.manual_seed(0)
    model = Tabular(sizes, len(NUMBERS))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["auc", "accuracy"],
        workers=2,
    )
    estimator.fit(
        train,
        epochs=6,
        batch_size=256,
        feature_cols=["city_id", "channel_id", "numbers"],
        label_cols="cancelled",
        verbose=0,
    )
    result = estimator.evaluate(test, verbose=0)
    print(f"categories {dict(zip(CATEGORIES, sizes, strict=True))}")
    print(f"test AUC {result['auc']:.3f}, accuracy {result['accuracy']:.3f}")

    # What a scoring job needs in addition to the model, as JSON.
    state = json.dumps({"indexer": indexer.to_dict(), "scaler": scaler.to_dict()})
    read = json.loads(state)
    indexer = StringIndexer.from_dict(read["indexer"])
    scaler = StandardScaler.from_dict(read["scaler"])
    new = spark.createDataFrame(
        [("city-3", "web", 60.0, 90), ("a new city", "phone", 60.0, 90)],
        "city string, channel string, price double, days_ahead int",
    )
    scored = estimator.predict(scaler.transform(indexer.transform(new)), output_cols="logit")
    scored.selectExpr("city", "channel", "round(1 / (1 + exp(-logit)), 3) AS risk").show()
    kindler.stop()


if __name__ == "__main__":
    main()
