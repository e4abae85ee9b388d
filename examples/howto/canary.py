"""Train, store, try on a share of the traffic, promote: a new version goes live without a failed request.

python examples/howto/canary.py
"""

import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import kindler


def train(layers, epochs):
    torch.manual_seed(0)
    estimator = kindler.Estimator.from_torch(
        model=nn.Sequential(*layers),
        optimizer=torch.optim.Adam,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=1,
        engine="local",
    )
    data = {"x": (digits.data[:1200] / 16).astype("float32"), "y": digits.target[:1200]}
    estimator.fit(data, epochs=epochs, batch_size=32, verbose=0)
    return estimator


@contextmanager
def serving(store):
    """`kindler serve --store STORE`, on a free port; its URL."""
    command = [sys.executable, "-m", "kindler", "serve", "--store", str(store), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


def send(client, requests):
    """Send one image per request; returns each version's number of answers, and of right answers."""
    answers, right = Counter(), Counter()
    for number in range(requests):
        row = 1200 + number % 597  # images that no version was trained on
        body = {"data": [(digits.data[row] / 16).tolist()]}
        reply = client.put("/api/v1/model/digits@prod/predict", json=body).raise_for_status()
        version = int(reply.headers["x-model-version"])
        answers[version] += 1
        right[version] += int(np.argmax(reply.json()["result"][0]) == digits.target[row])
    return answers, right


def main(folder):
    store = kindler.Store(folder)
    store.models.put(train([nn.Linear(64, 10)], epochs=2), "digits", tag="prod")
    with serving(folder) as url, httpx.Client(base_url=url, timeout=120) as client:
        answers, right = send(client, 100)
        print(f"before: version 1 right {right[1] / answers[1]:.2f}")

        candidate = train([nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)], epochs=12)
        version = store.models.put(candidate, "digits")  # has no tag, so it answers no requests
        shares = {"canary": {version.number: 0.3}}
        client.put("/api/v1/model/digits/tags/prod/split", json=shares).raise_for_status()
        while not send(client, 1)[0][version.number]:
            pass  # the server notices within --refresh-s, and loads the canary while version 1 answers
        answers, right = send(client, 300)
        old, new = (right[number] / answers[number] for number in (1, version.number))
        print(f"canary: version 1 right {old:.2f}, version 2 right {new:.2f}")
        counted = client.get("/api/v1/stats").json()["models"]["digits"]["versions"]
        print("failures:", {number: figures["failures"] for number, figures in sorted(counted.items())})

        if new > old and not counted[str(version.number)]["failures"]:
            moved = {"version": version.number}  # returns once the new version is served
            client.put("/api/v1/model/digits/tags/prod", json=moved).raise_for_status()
        store.models.split("digits@prod")  # removes the split
        print(f"production is version {store.models.metadata('digits@prod').number}")
        answers, _ = send(client, 50)
        print(f"answers now: {dict(answers)}")
    store.close()


digits = load_digits()
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
