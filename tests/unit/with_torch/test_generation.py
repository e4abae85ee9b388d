"""How the next token of an answer is chosen."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kindler.frameworks.torch.generation import _chosen, _Prompt
from kindler.types import Sampling


def test_tokens_are_drawn_with_the_probabilities_that_the_sampling_asks_for() -> None:
    logits = torch.tensor([0.0, 1.0, 2.5, -1.0, 0.5])
    expected = (logits / 2).softmax(0).numpy()

    def drawn(**options: Any) -> np.ndarray:
        counts = np.zeros(5)
        for seed in range(2000):
            told = {
                **asdict(Sampling(max_new_tokens=1, seed=seed, temperature=2.0, **options)),
                "details": False,
            }
            prompt = _Prompt.of(0, [1, 2, 3], json.dumps(told).encode())
            counts[_chosen(logits.unsqueeze(0), [prompt], set())[0]] += 1
        return counts / 2000

    assert np.abs(drawn() - expected).max() < 4 * math.sqrt(0.25 / 2000)
    assert set(np.flatnonzero(drawn(top_k=3)).tolist()) == {1, 2, 4}
    assert set(np.flatnonzero(drawn(top_p=0.6)).tolist()) == {1, 2}  # 0.48 and 0.23 of them
