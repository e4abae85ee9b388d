"""`inputs="kwargs"` and `loss="model"`: workers weigh the model's own loss by what it is a mean over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kindler import Estimator, Optimization
from kindler.errors import ConfigError
from tests.exact import assert_close

pytestmark = pytest.mark.torch

RANDOM = np.random.default_rng(5)
ROWS, WIDTH, CLASSES = 23, 9, 4
LENGTHS = RANDOM.integers(2, WIDTH + 1, ROWS)
TOKENS = RANDOM.integers(1, 12, (ROWS, WIDTH))
LABELS = np.where(np.arange(WIDTH) < LENGTHS[:, None], TOKENS % CLASSES, -100)


class Tagger(nn.Module):
    """Computes its own loss over tokens, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.out = nn.Embedding(12, 6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Any, scale: Any = None, labels: Any = None) -> dict[str, Any]:
        logits = self.out(self.words(tokens))
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.transpose(1, 2), labels)


class TinyForCausalLM(Tagger):
    """The label of a token is what the one before it predicts."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


class OddMean(Tagger):
    """A mean of which nobody else can know the divisor: tokens of class 0 do not count."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.transpose(1, 2), labels.where(labels != 0, -100))


class ToldMean(OddMean):
    def loss_divisor(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return ((inputs["labels"] != 0) & (inputs["labels"] != -100)).sum()


def estimator(model: nn.Module, workers: int, **options: Any) -> Estimator:
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss="model",
        inputs="kwargs",
        workers=workers,
        **options,
    )


def trained(model: nn.Module, workers: int, **options: Any) -> tuple[list[np.ndarray], Any, Estimator]:
    est = estimator(model, workers, **options)
    history = est.fit(
        {"tokens": TOKENS, "tags": LABELS},
        epochs=2,
        batch_size=8,
        feature_cols="tokens",
        label_cols="tags",
        shuffle=False,
        verbose=0,
    )
    return [p.detach().numpy().copy() for p in est.get_model().parameters()], history, est


@pytest.mark.parametrize("kind", [Tagger, TinyForCausalLM, ToldMean])
def test_two_workers_train_on_uneven_rows_as_one_process_does(kind: type[Tagger]) -> None:
    one, told, _ = trained(kind(), 1)
    two, also, est = trained(kind(), 2, metrics="accuracy")

    assert_close(two, one)
    assert also["loss"] == pytest.approx(told["loss"], rel=1e-4)
    judged = est.evaluate({"tokens": TOKENS, "tags": LABELS}, verbose=0)
    with torch.no_grad():
        outputs = est.get_model()(torch.from_numpy(TOKENS), labels=torch.from_numpy(LABELS))
    assert judged["loss"] == pytest.approx(float(outputs["loss"]), rel=1e-4)
    guess, labels = outputs["logits"].argmax(-1).numpy(), LABELS
    if kind is TinyForCausalLM:
        guess, labels = guess[:, :-1], LABELS[:, 1:]
    kept = labels != -100
    assert judged["accuracy"] == pytest.approx((guess == labels)[kept].mean())


def test_a_mean_over_something_else_is_refused_on_several_workers_and_trained_on_one() -> None:
    with pytest.raises(
        ConfigError, match="not a mean over rows, or over the labels that are not ignored, so several workers"
    ):
        trained(OddMean(), 2)
    with pytest.raises(ConfigError, match="the passes of accumulation_steps"):
        trained(OddMean(), 1, optimization=Optimization(accumulation_steps=2))
    _, history, _ = trained(OddMean(), 1)
    assert history["loss"][-1] < history["loss"][0]


def test_a_batch_without_any_label_that_counts_changes_nothing() -> None:
    model = Tagger()
    before = [p.detach().numpy().copy() for p in model.parameters()]
    est = estimator(model, 1)
    data = {"tokens": TOKENS[:4], "labels": np.full((4, WIDTH), -100)}
    est.fit(data, batch_size=4, feature_cols="tokens", label_cols="labels", verbose=0)
    assert_close([p.detach().numpy() for p in est.get_model().parameters()], before)


def test_labels_may_be_among_the_inputs_and_predict_gives_outputs_without_the_loss() -> None:
    model = Tagger()
    est = estimator(model, 1)
    data = {"tokens": TOKENS, "labels": LABELS}
    est.fit(data, batch_size=8, feature_cols=["tokens", "labels"], verbose=0)

    scored = est.predict(data, verbose=0)
    alone = est.predict({"tokens": TOKENS}, feature_cols="tokens", verbose=0)

    assert list(scored) == ["tokens", "labels", "logits"]
    np.testing.assert_allclose(scored["logits"], alone["logits"])


def test_a_model_without_a_loss_and_options_that_do_not_go_together_are_refused() -> None:
    class Silent(Tagger):
        def forward(self, tokens: Any, labels: Any = None) -> Any:
            return {"logits": self.out(self.words(tokens))}

    with pytest.raises(ConfigError, match="the model returned no loss for the inputs 'tokens', 'labels'"):
        trained(Silent(), 1)
    with pytest.raises(ConfigError, match="needs inputs='kwargs'"):
        Estimator.from_torch(model=Tagger(), loss="model")
    with pytest.raises(ConfigError, match="a creator or 'model'; received 'mse'"):
        Estimator.from_torch(model=Tagger(), loss="mse")
    with pytest.raises(ConfigError, match="'positional', 'dict' or 'kwargs'; received 'names'"):
        Estimator.from_torch(model=Tagger(), inputs="names")  # type: ignore[arg-type]
