"""The example of the README: train on a Spark DataFrame, score it, and store the model."""

import pandas as pd
from sklearn.datasets import load_digits
from torch import nn, optim

import kindler

spark = kindler.init(cores=2)

digits = load_digits()  # 1,797 images of 8 x 8 pixels
images = (digits.data / 16).astype("float32")
frame = spark.createDataFrame(pd.DataFrame({"features": list(images), "label": digits.target}))
train, test = frame.randomSplit([0.8, 0.2], seed=0)

estimator = kindler.Estimator.from_torch(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    optimizer=lambda model: optim.Adam(model.parameters(), lr=5e-3),
    loss=nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    workers=2,
)
estimator.fit(train, epochs=8, batch_size=64, validation_data=test).plot("history.png")
print(estimator.evaluate(test))

scored = estimator.predict(test)  # lazy: `test` and a column "prediction" with ten scores
best = "array_position(prediction, array_max(prediction)) - 1 AS predicted"
scored.selectExpr("label", best).show(3)

store = kindler.Store("models")  # a folder, or the URL of a database and an object store
store.models.put(estimator, "digits", tag="prod")  # version 1
store.datasets.put(images[:5], "five-digits")

kindler.stop()
