"""Where workers compute and what their programs can find out about it; half precision with scaled losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import kindler
from kindler import Device, Estimator, Optimization, RunSettings, Store
from kindler.callbacks import Callback
from kindler.errors import ConfigError
from kindler.models.loaded import load

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((48, 4), dtype=np.float32)
Y = X.sum(axis=1, keepdims=True)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def estimator(**options: Any) -> Estimator:
    return Estimator.from_torch(
        **{
            "model": network,
            "optimizer": torch.optim.Adam,
            "loss": nn.MSELoss(),
            "workers": 2,
            "settings": RunSettings(threads=1),
            **options,
        }
    )


class Notes(Callback):
    """Writes down what each worker knows of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_begin(self, run: Any) -> None:
        me = kindler.current_worker()
        facts = [me.rank, me.size, me.local_rank, me.local_size, me.device, me.host != ""]
        told = [os.environ[name] for name in VARIABLES] + [os.environ.get("CUDA_VISIBLE_DEVICES")]
        (self.folder / str(run.rank)).write_text(f"{facts} {told}")


def test_workers_know_who_they_are_and_see_one_gpu_which_a_cpu_build_leaves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    estimator().fit((X, Y), batch_size=16, verbose=0, callbacks=[Notes(tmp_path)])

    for rank, gpu in enumerate("57"):
        said = (tmp_path / str(rank)).read_text()
        assert said == f"[{rank}, 2, {rank}, 2, 'cpu', True] ['{rank}', '2', '{rank}', '2', '{gpu}']"


def test_outside_of_a_run_there_is_one_worker() -> None:
    me = kindler.current_worker()
    assert (me.rank, me.size, me.local_rank, me.local_size, me.device) == (0, 1, 0, 1, "cpu")
    assert me.host


def test_the_driver_refuses_more_workers_than_gpus_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    with pytest.raises(ConfigError, match="2 workers on one machine, which has 1 GPU:"):
        estimator().fit((X, Y), batch_size=16, verbose=0)

    estimator(device=Device(share=True)).fit((X, Y), batch_size=16, verbose=0)
    estimator(device="cpu").fit((X, Y), batch_size=16, verbose=0)


def test_as_many_workers_start_as_there_are_gpus_to_compute_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    estimator(workers=None).fit((X, Y), batch_size=16, verbose=0, callbacks=[Notes(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

    said = r"2 workers on one machine, which has 2 GPUs and device='cuda:1': (?s:.*)workers=1;"
    with pytest.raises(ConfigError, match=said):
        estimator(device="cuda:1").fit((X, Y), batch_size=16, verbose=0)
    with pytest.raises(ConfigError, match="'cuda' was requested; this machine has 0 CUDA devices"):
        estimator(device="cuda:1", workers=None).fit((X, Y), batch_size=16, verbose=0)


class Threads(Callback):
    """Writes down how many cores each worker computes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_begin(self, run: Any) -> None:
        (self.folder / f"{run.rank} of {run.size}").write_text(str(torch.get_num_threads()))


def test_without_a_gpu_one_worker_computes_on_all_cores_unless_more_are_asked_for(tmp_path: Path) -> None:
    for workers in (None, 2):
        est = estimator(workers=workers, settings=None)
        est.fit((X, Y), batch_size=16, verbose=0, callbacks=[Threads(tmp_path)])

    told = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    half = max(told["0 of 1"] // 2, 1)
    assert told == {"0 of 1": told["0 of 1"], "0 of 2": half, "1 of 2": half}


def test_the_history_says_how_steps_were_made_and_why(tmp_path: Path) -> None:
    history = estimator(workers=1, device=Device(compile="auto")).fit((X, Y), batch_size=16, verbose=0)

    assert history.mode == "eager: the device is cpu"
    assert estimator(workers=1).fit((X, Y), batch_size=16, verbose=0).mode is None


class MeetsOthers(nn.Module):
    """Uses the mean of all workers' rows, which it asks `torch.distributed` for."""

    def __init__(self) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise LookupError("there is no process group")
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            total = x.detach().sum(0)
            dist.all_reduce(total)
            assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
            self.seen = total
        return self.inner(x)


class SumOfAll(Callback):
    """The model's sums are those of the rows of the whole step."""

    def on_step_end(self, run: Any) -> None:
        if not np.allclose(run.model.seen.numpy(), X.sum(axis=0), atol=1e-4):
            raise AssertionError(f"{run.model.seen} is not the sum of all rows")


def test_a_model_may_call_torch_distributed() -> None:
    def fit(**options: Any) -> None:
        estimator(model=MeetsOthers, **options).fit(
            (X, Y), batch_size=len(X), verbose=0, callbacks=[SumOfAll()]
        )

    fit(device=Device(process_group=True))
    with pytest.raises(LookupError, match="there is no process group"):
        fit()


def test_a_worker_without_a_row_cannot_run_a_model_that_waits_for_all() -> None:
    est = estimator(device=Device(process_group=True))
    with pytest.raises(ConfigError, match=r"worker 1 has no row in step \d+, and with process_group=True"):
        est.fit((X[:1], Y[:1]), batch_size=16, verbose=0)


def test_fp16_trains_nearly_as_float32_on_any_number_of_workers() -> None:
    found = {}
    for workers, precision in ((1, None), (1, "fp16"), (2, "fp16")):
        est = estimator(
            workers=workers, device=Device(precision=precision), optimization=Optimization(clip_norm=1.0)
        )
        history = est.fit((X, Y * 0.1), epochs=3, batch_size=16, verbose=0)
        assert np.isfinite(history["loss"]).all()
        found[workers, precision] = np.concatenate([p.detach().ravel() for p in est.get_model().parameters()])
    np.testing.assert_allclose(found[1, "fp16"], found[1, None], atol=3e-3)
    np.testing.assert_allclose(found[2, "fp16"], found[1, "fp16"], atol=3e-3)
    assert not np.array_equal(found[1, "fp16"], found[1, None])


def test_options_of_devices_are_checked_before_anything_starts() -> None:
    for device, message in (
        (Device(precision="fp8"), "precision must be None, 'bf16' or 'fp16'; received 'fp8'"),
        (Device(tf32="yes"), "tf32 must be True or False; received 'yes'"),
        (Device(process_group=1), "process_group must be True or False; received 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            estimator(device=device)


def test_predict_computes_in_the_precision_that_it_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model = network()
    with torch.inference_mode():
        full = model(torch.from_numpy(X)).numpy()
        with torch.autocast("cpu", torch.bfloat16):
            half = model(torch.from_numpy(X)).float().numpy()
    plain = Estimator.from_torch(model=model, device="cpu")
    trained_in_half = Estimator.from_torch(model=model, device=Device("cpu", precision="bf16"))

    np.testing.assert_array_equal(plain.predict(X, batch_size=48, precision="bf16"), half)
    np.testing.assert_array_equal(trained_in_half.predict(X, batch_size=48), half)
    np.testing.assert_array_equal(trained_in_half.predict(X, batch_size=48, precision="fp32"), full)
    assert not np.array_equal(half, full)
    with pytest.raises(ConfigError, match="precision must be one of 'fp32', 'bf16', 'fp16', or None"):
        plain.predict(X, precision="int8")
    with pytest.raises(ConfigError, match="precision='bf16' is for the model's own framework"):
        plain.predict(X, precision="bf16", accelerator="openvino")


def test_a_stored_model_computes_on_the_cpu_unless_a_gpu_was_insisted_on(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    trained = estimator(workers=1)
    trained.fit((X, Y), batch_size=16, verbose=0)
    model = trained.get_model()
    with torch.inference_mode():
        expected = model(torch.from_numpy(X)).numpy()
    kinds = {"module": {}, "estimator": {}, "pickled": {"kind": "pickle", "trusted": True}}
    for name, options in kinds.items():
        version = om.models.put(trained if name == "estimator" else model, name, **options)
        loaded = load(om.store, version, trusted=True, device="auto")
        np.testing.assert_array_equal(loaded.predictor(X), expected)
        assert loaded.kind.device_bytes(version.meta) == 0
        with pytest.raises(ConfigError, match="'cuda' was requested; PyTorch was built without CUDA here"):
            _ = load(om.store, version, trusted=True, device="cuda").predictor
    om.close()
