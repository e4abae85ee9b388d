"""Shards trained on and scored in a session of the mode given; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import nn

import kindler
from kindler import Estimator, XShards


def fresh() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def main(mode: str) -> None:
    kindler.init(cores=2, conf={"spark.api.mode": mode, "spark.sql.shuffle.partitions": "2"})
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = x.sum(1)
    ends = [0, 15, 40]
    pairs = zip([0, *ends], ends, strict=False)
    shards = XShards.from_shards([{"x": x[a:b], "y": y[a:b]} for a, b in pairs])
    model = fresh()
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=nn.MSELoss(), workers=2
    )
    history = est.fit(shards, epochs=2, batch_size=40, verbose=0)
    judged = est.evaluate(shards, verbose=0)
    scored = est.predict(shards, batch_size=4)
    found = [shard["prediction"] for shard in scored.collect()]

    alone = fresh()
    sgd = torch.optim.SGD(alone.parameters(), 0.1)
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    for _ in range(2):
        sgd.zero_grad()
        nn.functional.mse_loss(alone(inputs)[:, 0], targets).backward()
        sgd.step()
    with torch.no_grad():
        expected = model(inputs).numpy()
    seen = {
        "engines": [shards.engine, scored.engine],
        "samples": [*history["num_samples"], judged["num_samples"]],
        "rows": [len(part) for part in found],
        "off by": float(np.abs(np.concatenate(found) - expected).max()),
        "weights": model.weight[0].tolist(),
        "expected": alone.weight[0].tolist(),
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
