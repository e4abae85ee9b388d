"""Text estimators of every task are stored as data, and do the same when another process reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator, Store
from kindler.types import Sampling

pytest.importorskip("transformers")

from tiny_text import classifier, ending_tokenizer, generator, sentences, tokenizer
from transformers import BertConfig, BertForTokenClassification

pytestmark = pytest.mark.torch

TEXTS = sentences(12)["text"]


def tagger() -> Any:
    config = classifier().config.to_dict()
    names = {"id2label": {0: "O", 1: "B-FILM", 2: "I-FILM"}, "num_labels": 3}
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**{**config, **names}))


def named_classifier() -> Any:
    model = classifier()
    model.config.id2label = {0: "bad", 1: "good"}
    return model


def number() -> Any:
    config = {**classifier().config.to_dict(), "problem_type": "regression", "num_labels": 1}
    return type(classifier())(BertConfig(**config))


MODELS: dict[Any, Any] = {
    "text-classification": named_classifier,
    "token-classification": tagger,
    "regression": number,
    "embedding": lambda: classifier().bert,
    "text-generation": lambda: generator("llama"),
    "text2text-generation": lambda: generator("t5"),
}


def outputs(est: Any, task: str, texts: list[str]) -> dict[str, Any]:
    """What the task's own method adds to texts."""
    data = {"text": texts}
    if task == "embedding":
        made = est.embed(data, verbose=0)
    elif task.endswith("generation"):
        made = est.generate(data, "text", sampling=Sampling(max_new_tokens=9), details=True, verbose=0)
    else:
        made = est.predict(data, feature_cols="text", verbose=0)
    return {name: [_plain(row) for row in made[name]] for name in made if name != "text"}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


PROGRAM = """
import json, sys
from kindler import Store
from test_text_round_trip import MODELS, outputs
with Store(sys.argv[1]) as store:
    texts = json.loads(sys.argv[2])
    print(json.dumps({task: outputs(store.models.get(task), task, texts) for task in MODELS}))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outputs of every task here, and in a process that reads the estimators from a store."""
    folder, here = tmp_path_factory.mktemp("round_trip") / "store", {}
    with Store(folder) as store:
        for task, model in MODELS.items():
            words = ending_tokenizer() if "generation" in task else tokenizer()
            est = Estimator.from_huggingface(model(), words, task=task, workers=1, device="cpu")
            here[task] = outputs(est, task, TEXTS)
            store.models.put(est, task)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), json.dumps(TEXTS)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return here, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("task", MODELS)
def test_an_estimator_from_a_store_does_the_same_in_another_process(both: Any, task: str) -> None:
    here, there = (each[task] for each in both)
    assert list(here) == list(there)
    assert any(len(set(map(str, rows))) > 1 for rows in here.values())
    for name, rows in here.items():
        if isinstance(np.ravel(rows[0])[0], float) and name != "entities":
            for one, two in zip(rows, there[name], strict=True):
                np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
        elif name == "entities":
            assert any(rows)
            for one, two in zip(rows, there[name], strict=True):
                scores = [[entity.pop("score") for entity in row] for row in (one, two)]
                np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
                assert one == two
        else:
            assert rows == there[name]
