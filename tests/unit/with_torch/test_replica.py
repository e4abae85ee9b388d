"""One replica in one process: targets and losses, schedules, state, prediction."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from kindler.errors import ConfigError, DataError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, Rows, batch

pytestmark = pytest.mark.torch

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 4), dtype=np.float32)
Y = RNG.standard_normal(12, dtype=np.float32)
CLASSES = RNG.integers(0, 3, 12)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _replica(model: Any, loss: Any = None, optimizer: Any = SGD, **options: Any) -> TorchReplica:
    names = options.pop("feature_names", ())
    spec = TorchSpec(model=model, loss=loss, optimizer=optimizer, **options)
    return TorchReplica(spec, device="cpu", feature_names=names)


def _evaluated(replica: TorchReplica, rows: Rows) -> dict[str, float]:
    replica.eval_step(rows)
    return replica.merge_tallies([replica.take_tallies()])


def _output(replica: TorchReplica) -> torch.Tensor:
    return torch.from_numpy(replica.predict((X,))[0])


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_scalar_labels_meet_a_column_of_outputs_without_broadcasting(loss: nn.Module, dtype: Any) -> None:
    replica = _replica(nn.Linear(4, 1), loss)
    labels = (Y * 5).astype(dtype)

    expected = loss(_output(replica).reshape(-1), torch.from_numpy(labels).float()).item()
    assert _evaluated(replica, batch(X, labels))["loss"] == pytest.approx(expected, rel=1e-5)


def test_bool_labels_serve_a_binary_loss() -> None:
    replica = _replica(nn.Linear(4, 1), nn.BCEWithLogitsLoss(), metrics="accuracy")
    found = _evaluated(replica, batch(X, Y > 0))

    output = _output(replica).reshape(-1)
    target = torch.from_numpy((Y > 0).astype(np.float32))
    expected = nn.functional.binary_cross_entropy_with_logits(output, target).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == pytest.approx(((output > 0) == (target > 0)).double().mean().item())


def test_a_loss_of_the_users_own_is_not_broadcast_either() -> None:
    replica = _replica(nn.Linear(4, 1), lambda output, target: ((output - target) ** 2).mean())

    expected = ((_output(replica).reshape(-1) - torch.from_numpy(Y)) ** 2).mean().item()
    assert _evaluated(replica, batch(X, Y))["loss"] == pytest.approx(expected, rel=1e-5)


def test_labels_that_would_be_broadcast_are_refused_with_both_shapes() -> None:
    replica = _replica(nn.Linear(4, 3), nn.MSELoss())

    with pytest.raises(DataError, match=r"shape \(12, 3\) and the label \(12,\)"):
        replica.train_step(batch(X, Y))


@pytest.mark.parametrize(
    "labels", [CLASSES, CLASSES.astype(np.float32), CLASSES.reshape(-1, 1), CLASSES.astype(np.int32)]
)
def test_class_numbers_come_in_any_number_type_and_as_a_column(labels: Array) -> None:
    replica = _replica(nn.Linear(4, 3), nn.CrossEntropyLoss())

    expected = nn.functional.cross_entropy(_output(replica), torch.from_numpy(CLASSES)).item()
    assert _evaluated(replica, batch(X, labels))["loss"] == pytest.approx(expected, rel=1e-5)


def test_class_probabilities_are_taken_as_they_are() -> None:
    replica = _replica(nn.Linear(4, 3), nn.CrossEntropyLoss())
    soft = np.random.default_rng(2).dirichlet(np.ones(3), 12).astype(np.float32)

    expected = nn.functional.cross_entropy(_output(replica), torch.from_numpy(soft)).item()
    assert _evaluated(replica, batch(X, soft))["loss"] == pytest.approx(expected, rel=1e-5)


def test_class_numbers_of_a_wrong_shape_are_refused_with_both_shapes() -> None:
    with pytest.raises(DataError, match=r"\(12, 3\) and the label \(12, 2\).*class numbers \(12,\)"):
        _replica(nn.Linear(4, 3), nn.CrossEntropyLoss()).eval_step(batch(X, np.zeros((12, 2), np.int64)))


def test_pixels_are_judged_as_one_process_judges_them() -> None:
    images = np.random.default_rng(3).standard_normal((4, 2, 5, 5), dtype=np.float32)
    pixels = np.random.default_rng(4).integers(0, 3, (4, 5, 5))
    pixels[0] = -100
    replica = _replica(nn.Conv2d(2, 3, 1), nn.CrossEntropyLoss(), accumulation_steps=3)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1)
    model.load_state_dict(replica.model.state_dict())
    value = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(pixels))
    value.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    replica.train_step(batch(images, pixels))

    assert replica.running_loss() == pytest.approx(value.item(), rel=1e-5)
    for mine, its in zip(replica.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5)


def test_unreduced_losses_are_averaged() -> None:
    replica = _replica(nn.Linear(4, 1), nn.MSELoss(reduction="none"))

    expected = ((_output(replica).reshape(-1) - torch.from_numpy(Y)) ** 2).mean().item()
    assert _evaluated(replica, batch(X, Y))["loss"] == pytest.approx(expected, rel=1e-5)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(2, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(a), self.right(b)


def _two_losses(left: Any, right: Any, value: Any, kind: Any) -> torch.Tensor:
    return nn.functional.mse_loss(left, value) + nn.functional.cross_entropy(right, kind)


def test_several_features_outputs_and_labels_meet_in_order() -> None:
    rows = Rows((X, X[:, :2].copy()), (Y.reshape(-1, 1), CLASSES), 12, 12)
    replica = _replica(TwoHeads(), _two_losses)
    replica.train_step(rows)
    left, right = replica.predict(rows.features)

    assert (left.shape, right.shape) == ((12, 1), (12, 3))
    assert math.isfinite(replica.running_loss())


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"b": self.last(inputs["wide"]), "a": inputs["narrow"] * 2}


def test_a_model_may_take_and_return_dicts() -> None:
    replica = _replica(ByName(), inputs="dict", feature_names=("narrow", "wide"))
    last, doubled = replica.predict((X[:, :1].copy(), X))

    assert last.shape == (12, 2)
    np.testing.assert_allclose(doubled, X[:, :1] * 2)


def test_outputs_that_are_no_tensors_cannot_be_predicted() -> None:
    class Text(nn.Module):
        def forward(self, x: torch.Tensor) -> list[str]:
            return ["a"]

    with pytest.raises(ConfigError, match="it returned str"):
        _replica(Text()).predict((X,))


def test_half_precision_trains_and_predicts_in_float32() -> None:
    replica = _replica(
        nn.Linear(4, 1), nn.MSELoss(), precision="bf16", metrics=torchmetrics.MeanSquaredError()
    )
    exact = _replica(nn.Linear(4, 1), nn.MSELoss())
    exact.load_state(replica.state(), weights_only_model=True)
    replica.train_step(batch(X, Y))
    exact.train_step(batch(X, Y))

    [found] = replica.predict((X,))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact.predict((X,))[0], atol=0.05)


def test_prediction_uses_the_model_as_it_is_after_training_not_while() -> None:
    replica = _replica(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)), nn.MSELoss())
    replica.train_step(batch(X, Y))

    np.testing.assert_array_equal(replica.predict((X,))[0], replica.predict((X,))[0])


def test_a_model_may_write_its_input_even_if_the_array_may_not_be_written() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    frozen = X.copy()
    frozen.flags.writeable = False

    np.testing.assert_array_equal(_replica(Doubling()).predict((frozen,))[0], X * 2)
    np.testing.assert_array_equal(frozen, X)


def _by_step(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=config["gamma"])


def _on_plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize(("moves", "rates"), [("epoch", [0.1, 0.1, 0.05]), ("step", [0.05, 0.025, 0.025])])
def test_the_schedule_moves_when_it_was_asked_to(moves: Any, rates: list[float]) -> None:
    replica = _replica(
        nn.Linear(4, 1), nn.MSELoss(), scheduler=_by_step, scheduler_step=moves, config={"gamma": 0.5}
    )
    seen = []
    for _ in range(2):
        replica.train_step(batch(X, Y))
        seen.append(replica.learning_rate())
    replica.end_epoch({"loss": 1.0})

    assert [*seen, replica.learning_rate()] == pytest.approx(rates)


def test_a_plateau_is_seen_in_the_epochs_loss() -> None:
    replica = _replica(nn.Linear(4, 1), nn.MSELoss(), scheduler=_on_plateau)
    for loss in (1.0, 2.0):
        replica.train_step(batch(X, Y))
        replica.end_epoch({"loss": loss})

    assert replica.learning_rate() == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau monitors 'loss'"):
        replica.end_epoch()


def test_values_of_gradients_are_clipped() -> None:
    replica = _replica(nn.Linear(4, 1), nn.MSELoss(), clip_value=1e-3)
    before = replica.model.weight.detach().clone()
    replica.train_step(batch(X, Y * 100))

    torch.testing.assert_close(
        (before - replica.model.weight).abs(), torch.full((1, 4), 1e-4), rtol=1e-2, atol=0
    )


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def _resumable() -> TorchReplica:
    return _replica(
        _dropping,
        nn.MSELoss(),
        functools.partial(torch.optim.Adam, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        scheduler_step="step",
    )


def test_going_on_from_a_state_equals_never_having_stopped() -> None:
    straight = _resumable()
    straight.begin_epoch(0)
    for _ in range(3):
        straight.train_step(batch(X, Y))
    saved = straight.state()
    for _ in range(3):
        straight.train_step(batch(X, Y))
    resumed = _resumable()
    resumed.load_state(saved)
    assert (resumed.epoch, resumed.step) == (0, 3)
    for _ in range(3):
        resumed.train_step(batch(X, Y))

    assert resumed.learning_rate() == straight.learning_rate() == pytest.approx(0.0001)
    for mine, its in zip(
        resumed.model.state_dict().values(), straight.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, its)


def test_what_is_frozen_does_not_see_later_steps() -> None:
    replica = _resumable()
    replica.train_step(batch(X, Y))
    at_once, later = replica.state(), replica.freeze()
    replica.train_step(batch(X, Y))

    found = []
    for saved in (at_once, b"".join(later())):
        again = _resumable()
        again.load_state(saved)
        again.train_step(batch(X, Y))
        found.append([again.step, *(tensor.tolist() for tensor in again.model.state_dict().values())])
    assert found[0] == found[1]
    assert found[0][0] == 2


def test_shared_weights_are_frozen_once() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        model[1].weight = model[0].weight
        return model

    def untied() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    assert len(_replica(tied).state()) < 0.6 * len(_replica(untied).state())


def test_tallies_and_randomness_go_on_in_the_middle_of_an_epoch() -> None:
    def counting() -> TorchReplica:
        auc = torchmetrics.AUROC(task="binary")
        return _replica(_dropping, nn.BCEWithLogitsLoss(), metrics={"accuracy": "accuracy", "auc": auc})

    straight = counting()
    straight.begin_epoch(1)
    straight.train_step(batch(X, Y > 0))
    state, local = straight.state(), straight.local_state()
    resumed = counting()
    resumed.load_state(state)
    resumed.begin_epoch(1)
    resumed.load_local_state(local)
    assert resumed.loss_sums() == straight.loss_sums()
    assert resumed.running_metrics() == straight.running_metrics()
    torch_state = torch.get_rng_state()
    straight.load_local_state(local)  # one process has one source of randomness
    assert torch.equal(torch.get_rng_state(), torch_state)

    figures = []
    for replica in (straight, resumed):
        torch.set_rng_state(torch_state)
        replica.train_step(batch(X, Y > 0))
        figures.append(replica.merge_tallies([replica.take_tallies()]))
    assert figures[0] == figures[1]
    assert figures[0]["num_samples"] == 24


def test_tallies_in_checkpoints_of_earlier_versions_are_counted_together() -> None:
    from kindler.frameworks.torch.state import dump, parse

    replica = _replica(_dropping, nn.BCEWithLogitsLoss(), metrics=["accuracy", "auc"])
    replica.begin_epoch(1)
    replica.train_step(batch(X, Y > 0))
    fields, expected = parse(replica.local_state()), replica.loss_sums()
    tallies = fields["tallies"]
    sums = tallies.pop("sums")
    loss, weight = sums.pop("loss")
    tallies |= {"loss": loss, "weight": weight}
    tallies |= {
        key: {name: both[place] for name, both in sums.items()}
        for place, key in enumerate(("means", "counts"))
    }
    earlier = dump({**fields, "tallies": tallies, "changed": []})

    replica.load_local_state(earlier)
    assert replica.loss_sums() == pytest.approx(expected)
    replica.join_local_states([earlier, earlier], size=1)
    assert replica.loss_sums() == pytest.approx([2 * number for number in expected])
    merged = replica.merge_tallies([replica.take_tallies()])
    assert (merged["num_samples"], 0 <= merged["accuracy"] <= 1, 0 <= merged["auc"] <= 1) == (24, True, True)


def test_an_epoch_is_the_same_whatever_came_before_it() -> None:
    draws = []
    for before in (0, 3):
        replica = _resumable()
        torch.rand(before)
        replica.begin_epoch(2)
        draws.append(torch.rand(2))

    assert torch.equal(draws[0], draws[1])


def test_only_the_model_can_be_taken_from_a_state() -> None:
    trained = _resumable()
    trained.train_step(batch(X, Y))
    other = _resumable()
    other.load_state(trained.state(), weights_only_model=True)

    assert other.step == 0
    assert not other.optimizer.state
    np.testing.assert_array_equal(other.predict((X,))[0], trained.predict((X,))[0])


def test_a_state_of_another_format_is_refused() -> None:
    import io

    from kindler.frameworks.state_format import pack

    head = io.BytesIO()
    torch.save({"format": 99}, head)
    with pytest.raises(ConfigError, match="its format is 99"):
        _resumable().load_state(b"".join(pack(head.getvalue(), [])))
    with pytest.raises(ConfigError, match="not a replica's state"):
        _resumable().load_state(head.getvalue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_large_tensors_come_back_as_they_were_and_shared_ones_shared(dtype: torch.dtype) -> None:
    from kindler.frameworks.torch.state import Freezer, parse

    large = torch.arange(40_000).to(dtype).reshape(200, 200)
    fields = {"model": {"a": large, "tied": large, "turned": large.t(), "small": torch.ones(3)}, "step": 7}
    freezer = Freezer()
    first = freezer.freeze(fields)
    kept = b"".join(first())
    large.add_(1)
    b"".join(freezer.freeze(fields)())

    found = parse(kept)

    assert found["step"] == 7
    assert torch.equal(found["model"]["a"], torch.arange(40_000).to(dtype).reshape(200, 200))
    assert torch.equal(found["model"]["turned"], found["model"]["a"].t())
    assert found["model"]["tied"].data_ptr() == found["model"]["a"].data_ptr()
    assert torch.equal(found["model"]["small"], torch.ones(3))


def test_tallies_start_anew_once_they_are_taken() -> None:
    replica = _replica(nn.Linear(4, 1), nn.MSELoss(), metrics=["mae"])
    first = _evaluated(replica, batch(X, Y))
    second = _evaluated(replica, batch(X, Y))

    assert first == second
    assert first["num_samples"] == 12
    assert math.isnan(replica.running_loss())


def test_tallies_of_no_rows_at_all_are_nan_and_not_an_error() -> None:
    replica = _replica(
        nn.Linear(4, 3), nn.CrossEntropyLoss(), metrics=["accuracy", torchmetrics.MeanMetric()]
    )
    found = replica.merge_tallies([replica.take_tallies(), replica.take_tallies()])

    assert math.isnan(found["loss"])
    assert math.isnan(found["accuracy"])
    assert math.isnan(found["MeanMetric"])
    assert found["num_samples"] == 0


def test_binary_metrics_take_float_labels_and_a_column_of_outputs() -> None:
    labels = (Y > 0).astype(np.float32)
    metrics = {"auroc": torchmetrics.AUROC(task="binary"), "f1": torchmetrics.classification.BinaryF1Score}
    replica = _replica(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), nn.BCELoss(), metrics=metrics)
    found = _evaluated(replica, batch(X, labels))

    output, target = _output(replica).reshape(-1), torch.from_numpy(labels).long()
    assert found["auroc"] == pytest.approx(torchmetrics.functional.auroc(output, target, "binary").item())
    assert found["f1"] == pytest.approx(torchmetrics.functional.f1_score(output, target, "binary").item())


def test_a_replica_joins_others_once() -> None:
    alone: Any = type("Alone", (), {"rank": 0, "size": 1})()
    replica = _replica(nn.Linear(4, 1))
    replica.join(alone)

    with pytest.raises(ConfigError, match="has joined others already"):
        replica.join(alone)


def test_what_adam_adds_to_a_state_is_known_before_it_has_stepped() -> None:
    def replica() -> TorchReplica:
        adam = functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True)
        spec = TorchSpec(model=nn.Linear(100, 100), optimizer=adam, loss=nn.MSELoss())
        return TorchReplica(spec, device="cpu")

    expected, trained = replica().expected_bytes(), replica()
    x = np.ones((4, 100), np.float32)
    trained.train_step(batch(x, x))

    assert len(trained.state()) == pytest.approx(expected, rel=0.05)
