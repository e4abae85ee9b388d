"""Put a trained model into a store, and predict with it in a resident worker."""

import torch
from sklearn.datasets import load_digits

from kindler import Estimator, Store

if __name__ == "__main__":
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    estimator = Estimator.from_torch(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Softmax(1)),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-2),
        loss=lambda scores, labels: torch.nn.functional.nll_loss(scores.log(), labels),
    )
    estimator.fit({"x": images, "y": digits.target}, epochs=8, batch_size=64)

    store = Store("models")  # a folder, or the URL of a database and an object store
    store.models.put(estimator, "digits", tag="prod")  # version 1
    store.datasets.put(images[:5], "five-digits")
    scores = store.runtime.model("digits@prod").predict("five-digits").get()
    print(scores.argmax(1), digits.target[:5])
    store.close()
