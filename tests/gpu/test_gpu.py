"""Training, scoring and serving on a real GPU, with the local engine. Skipped where there is none.

Needs nothing but torch (Keras and onnxruntime where they are installed) and what Kindler itself needs. By
hand: `make test-gpu`, or without pytest: `PYTHONPATH=src python tests/gpu/test_gpu.py`, where `--only
serve,predict,sharded` runs the tests with one of these words in their names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kindler import Device, Optimization
from kindler.strategies import Zero1

try:
    import pytest
except ModuleNotFoundError:  # run as a program, below
    pytest = None  # type: ignore[assignment]

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5, 3.0], "float32")).reshape(-1, 1)


def _has_cuda() -> bool:
    # Asked in another process: what this one asks, it must not have asked before the first fit.
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if pytest is not None:
    pytestmark = [
        pytest.mark.torch,
        pytest.mark.gpu,
        pytest.mark.skipif(not _has_cuda(), reason="there is no CUDA device"),
    ]


def estimator(**options: Any) -> Any:
    import torch
    from torch import nn

    from kindler import Estimator

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    return Estimator.from_torch(
        model=model, optimizer=torch.optim.Adam, loss=nn.MSELoss(), **{"workers": 1, **options}
    )


def trained(**options: Any) -> tuple[Any, list[np.ndarray]]:
    est = estimator(**options)
    est.fit((X, Y), epochs=2, batch_size=32, verbose=0)
    return est, [value.cpu().numpy() for value in est.get_model().state_dict().values()]


def _assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_auto_takes_the_gpu_and_ends_with_the_weights_of_the_cpu() -> None:
    _, expected = trained(device="cpu")
    for device in ("auto", "cuda", "cuda:0"):
        _, found = trained(device=device)
        _assert_close(found, expected)


def test_a_second_fit_in_the_same_process_finds_the_gpu_too() -> None:
    est, _ = trained(device="cuda")
    est.fit((X, Y), epochs=1, batch_size=32, verbose=0)


def test_workers_compute_on_the_gpu() -> None:
    import torch

    from kindler.callbacks import Callback

    class Look(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.step == 1 and not torch.cuda.memory_allocated():
                raise RuntimeError("nothing is on the GPU")

    estimator(device="auto").fit((X, Y), epochs=1, batch_size=32, callbacks=[Look()], verbose=0)


def test_two_workers_share_one_gpu_and_end_with_the_weights_of_two_on_the_cpu() -> None:
    _, expected = trained(device="cpu", workers=2)
    _, found = trained(device=Device("cuda", share=True), workers=2)
    _assert_close(found, expected)


def test_evaluate_and_predict_use_the_gpu_after_it_was_trained_there() -> None:
    est, _ = trained(device="cuda")
    figures = est.evaluate((X, Y), batch_size=32, verbose=0)
    predicted = np.asarray(est.predict(X, batch_size=32)).reshape(-1, 1)
    np.testing.assert_allclose(figures["loss"], np.mean((predicted - Y) ** 2), rtol=1e-3)


def test_a_driver_that_has_used_the_gpu_can_train_on_it() -> None:
    import torch

    torch.zeros(1, device="cuda")
    trained(device="cuda")


def classifier(**options: Any) -> tuple[Any, Any, list[np.ndarray]]:
    """A fit of a small classifier with dropout, an uneven last step and a rate that falls; what it says."""
    import torch
    from torch import nn

    from kindler import Estimator

    labels = (X[:, 0] > 0).astype("int64")
    labels[200:230] = options.pop("label", 1)
    extra = options.pop("layer", nn.Identity)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), extra(), nn.Linear(16, 2)
        )

    est = Estimator.from_torch(
        model=model,
        optimizer=options.pop("optimizer", torch.optim.AdamW),
        loss=nn.CrossEntropyLoss(weight=options.pop("weight", None)),
        scheduler=lambda optimizer, config: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        **{"device": "cuda", "workers": 1, "metrics": "accuracy", **options},
    )
    history = est.fit((X, labels), epochs=4, batch_size=40, verbose=0)
    return est, history, [value.cpu().numpy() for value in est.get_model().state_dict().values()]


def _assert_same_training(*, on: dict[str, Any] | None = None, **options: Any) -> None:
    """`on`: more about the device."""
    on = on or {}
    _, eager, expected = classifier(device=Device("cuda", cache=False, **on), **options)
    _, graphs, found = classifier(device=Device("cuda", compile="graphs", **on), **options)
    assert graphs.mode == "graphs", graphs.mode
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for name in ("loss", "num_samples", "steps", *(name for name in eager.names if "acc" in name)):
        np.testing.assert_allclose(list(graphs[name]), list(eager[name]), rtol=1e-6)


def test_steps_as_graphs_end_with_the_weights_of_eager_steps() -> None:
    import torch

    _assert_same_training()
    _assert_same_training(label=-100)  # some steps have labels that do not count
    _assert_same_training(
        optimization=Optimization(clip_norm=0.1), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    _assert_same_training(weight=torch.tensor([0.2, 0.8]))
    _assert_same_training(optimization=Optimization(accumulation_steps=4))


def test_steps_as_graphs_up_to_the_gradients_end_with_the_weights_of_eager_steps() -> None:
    import torch

    in_steps = Optimization(scheduler_step="step", accumulation_steps=2, clip_norm=0.1)
    _assert_same_training(optimization=in_steps)
    _assert_same_training(on={"precision": "fp16"})
    _assert_same_training(optimizer=torch.optim.Adagrad)
    _assert_same_training(on={"share": True}, workers=2)
    _assert_same_training(on={"share": True}, workers=2, label=-100, optimization=in_steps)


def test_metrics_with_states_count_the_steps_that_graphs_replay() -> None:
    import torchmetrics

    metrics = {
        "acc": torchmetrics.Accuracy("multiclass", num_classes=2),
        "curve_acc": torchmetrics.AUROC("multiclass", num_classes=2),  # keeps all values
    }
    _assert_same_training(metrics=metrics)


def test_a_layer_that_draws_in_python_is_not_recorded() -> None:
    import random

    from torch import nn

    class Skips(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if random.random() < 0.5 else x * 2

    _, eager, expected = classifier(layer=Skips)
    _, auto, found = classifier(layer=Skips, device=Device("cuda", compile="auto"))
    _assert_close(found, expected)
    assert list(auto["num_samples"]) == list(eager["num_samples"])
    _assert_refused(
        lambda: classifier(layer=Skips, device=Device("cuda", compile="graphs")), "random numbers in Python"
    )


def test_a_layer_that_reads_a_value_back_is_not_recorded() -> None:
    from torch import nn

    class Looks(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum().item() > 0 else x * 2

    _, eager, expected = classifier(layer=Looks)
    _, auto, found = classifier(layer=Looks, device=Device("cuda", compile="auto"))
    _assert_close(found, expected)
    assert list(auto["num_samples"]) == list(eager["num_samples"])
    _assert_refused(
        lambda: classifier(layer=Looks, device=Device("cuda", compile="graphs")), "reads a value back"
    )


def _assert_refused(fit: Callable[[], Any], message: str) -> None:
    from kindler.errors import ConfigError

    said = ""
    try:
        fit()
    except ConfigError as exc:
        said = str(exc)
    assert message in said


def test_two_workers_that_were_not_told_to_share_are_refused_and_the_default_is_one_for_each_gpu() -> None:
    import torch

    several = 1 + torch.cuda.device_count()
    _assert_refused(lambda: trained(device="cuda", workers=several), "workers on one machine, which has")
    est, _ = trained(workers=None)
    assert est.history[-1]["num_samples"] == len(X)


def test_two_workers_that_share_a_gpu_end_with_the_weights_of_one() -> None:
    _, one = trained(device="cuda")
    _, two = trained(device=Device("cuda", share=True), workers=2)
    for found, expected in zip(two, one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_and_tf32_train() -> None:
    _, expected = trained(device="cuda")
    for device in (
        Device("cuda", precision="fp16"),
        Device("cuda", precision="bf16"),
        Device("cuda", tf32=True),
    ):
        est, found = trained(device=device)
        assert np.isfinite(est.history["loss"]).all()
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=0.02)


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    import tempfile

    for device in (Device("cuda"), Device("cuda", compile="graphs")):
        whole = estimator(device=device)
        whole.fit((X, Y), epochs=4, batch_size=32, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            first = estimator(device=device)
            first.fit((X, Y), epochs=2, batch_size=32, checkpoint=folder, verbose=0)
            second = estimator(device=device)
            second.fit((X, Y), epochs=4, batch_size=32, checkpoint=folder, resume=True, verbose=0)
        for one, other in zip(
            second.get_model().state_dict().values(), whole.get_model().state_dict().values(), strict=True
        ):
            assert np.array_equal(one.cpu().numpy(), other.cpu().numpy()), device


def test_out_of_memory_and_an_index_out_of_range_reach_the_user_with_a_hint_and_the_next_fit_works() -> None:
    import torch
    from torch import nn

    from kindler import Estimator

    class Huge(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + torch.empty(1 << 42, device=x.device)[:1]

    class Far(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.weight[:, :2][(x[:, 0] > -99).long() * 99].detach()

    def fit(model: Any, labels: Any) -> str:
        est = Estimator.from_torch(
            model=model, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=1, device="cuda"
        )
        try:
            est.fit((X, labels), batch_size=32, verbose=0)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""

    good = (X[:, 0] > 0).astype("int64")
    said = fit(lambda: Huge(4, 2), good)
    assert "OutOfMemory" in said, said
    assert "a smaller batch_size" in said, said
    said = fit(lambda: Far(4, 2), good)
    assert "device-side assert" in said, said
    assert "those of an embedding 0 to num_embeddings - 1" in said, said
    assert "labels must be from 0 to 1" in fit(lambda: nn.Linear(4, 2), good + 5)
    assert fit(lambda: nn.Linear(4, 2), good) == ""


def test_workers_know_their_device_and_a_model_may_call_torch_distributed() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import kindler

    class Asks(nn.Linear):
        def forward(self, x: Any) -> Any:
            me = kindler.current_worker()
            total = torch.ones(1, device=x.device)
            dist.all_reduce(total)
            if (me.device, me.size, total.item()) != ("cuda", dist.get_world_size(), me.size):
                raise RuntimeError(f"{me}: {total}")
            return super().forward(x)

    for workers in (1, 2):
        kindler.Estimator.from_torch(
            model=lambda: Asks(4, 1),
            optimizer=torch.optim.SGD,
            loss=nn.MSELoss(),
            device=Device("cuda", share=workers > 1, process_group=True),
            workers=workers,
        ).fit((X, Y), batch_size=32, verbose=0)


def test_synchronised_batch_norm_on_two_workers_sees_the_rows_of_both() -> None:
    import torch
    from torch import nn

    from kindler import Estimator

    def fit(norm: Any, **options: Any) -> list[np.ndarray]:
        est = Estimator.from_torch(
            model=lambda: nn.Sequential(nn.Linear(4, 8), norm(8), nn.Linear(8, 1)),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss=nn.MSELoss(),
            **options,
        )
        est.fit((X, Y), epochs=2, batch_size=32, verbose=0)
        return [value.cpu().numpy() for value in est.get_model().state_dict().values()]

    one = fit(nn.BatchNorm1d, workers=1, device="cuda")
    two = fit(nn.SyncBatchNorm, workers=2, device=Device("cuda", share=True, process_group=True))
    for found, expected in zip(two, one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_predict_gives_the_same_rows_twice_in_uneven_batches_and_in_half_precision() -> None:
    est, _ = trained(device="cuda")
    rows = np.random.default_rng(1).normal(size=(1000, 4)).astype("float32")
    expected = np.concatenate([est.predict(rows[i : i + 96], batch_size=96) for i in range(0, 1000, 96)])
    for _ in range(2):
        np.testing.assert_array_equal(est.predict(rows, batch_size=96), expected)
    rows.flags.writeable = False
    np.testing.assert_array_equal(est.predict(rows, batch_size=96), expected)
    half = est.predict(rows, batch_size=96, precision="bf16")
    assert half.dtype == np.float32
    assert not np.array_equal(half, expected)
    np.testing.assert_allclose(half, expected, atol=0.1)


def test_predict_of_several_tasks_has_one_model_on_the_gpu() -> None:
    import tempfile

    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        rows = np.random.default_rng(1).normal(size=(4000, 4)).astype("float32")
        pq.write_table(pa.table({"x": list(rows)}), f"{folder}/rows.parquet", row_group_size=500)
        est = estimator(device="cuda", workers=2)
        expected = np.asarray(est.predict(rows, batch_size=100)).reshape(-1)
        est.predict(
            f"{folder}/rows.parquet", batch_size=100, feature_cols="x", output_path=f"{folder}/out", verbose=0
        )
        found = pq.read_table(f"{folder}/out")["prediction"].to_pylist()
        np.testing.assert_allclose(np.asarray(found).reshape(-1), expected, rtol=1e-5, atol=1e-6)
        there = [line for line in _commands() if "kindler.inference._host_model_main" in line]
        assert len(there) == 1, there


def _commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_serve_computes_a_torch_model_on_the_gpu_and_another_on_the_cpu() -> None:
    import tempfile

    for package in ("fastapi", "uvicorn", "sqlalchemy", "prometheus_client", "orjson"):
        _need(package)
    with tempfile.TemporaryDirectory() as folder:
        told = _run(textwrap.dedent(_SERVED).replace("FOLDER", repr(folder)), {})
        assert "served" in told, told


_SERVED = """
    import json, os, subprocess, sys, urllib.request
    import numpy as np
    import torch
    from kindler import Store

    store = Store(FOLDER + "/store")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    store.models.put(model, "net")
    store.models.put(model, "own")
    store.close()
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    expected = model(torch.from_numpy(rows)).detach().numpy()

    def ask(url, data=None, method="GET"):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    for trusted in (["--trusted"], []):
        words = ["serve", "--store", FOLDER + "/store", "--port", "0"]
        words += ["--device", "auto", "--device", "own=cpu"]
        server = subprocess.Popen(
            [sys.executable, "-m", "kindler.cli", *words, *trusted], stdout=subprocess.PIPE, text=True
        )
        try:
            url = server.stdout.readline().rpartition(" at ")[2].strip()
            for name in ("net", "own"):
                reply = ask(f"{url}/v1/models/{name}:predict", {"instances": rows.tolist()}, "POST")
                np.testing.assert_allclose(reply["predictions"], expected, rtol=1e-3, atol=1e-4)
            loaded = {one["name"]: one for one in ask(f"{url}/api/v1/stats")["loaded"]}
            print(trusted, {name: (one["device"], one["device_bytes"]) for name, one in loaded.items()})
            assert loaded["own"]["device"] == "cpu"
            if trusted:  # whether CUDA works in a locked process is for the kernel and the driver to say
                assert loaded["net"]["device"] == "cuda:0"
                assert loaded["net"]["device_bytes"] > 0
        finally:
            server.terminate()
            server.wait(60)
    print("served")
"""


def test_sharded_optimizers_of_two_workers_on_one_gpu_end_with_the_weights_of_all_reduce() -> None:
    def weights(**fit: Any) -> list[np.ndarray]:
        est = estimator(device=Device("cuda", share=True), workers=2)
        est.fit((X, Y), epochs=2, batch_size=32, verbose=0, **fit)
        return [value.cpu().numpy() for value in est.get_model().state_dict().values()]

    expected = weights()
    for found, one in zip(weights(strategy="zero1"), expected, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)
    _assert_refused(lambda: weights(strategy=Zero1(one_copy=True)), "one_copy=True, but")
    _assert_refused(lambda: weights(strategy="fsdp"), "2 workers share 1 GPUs, and each needs its own")


def test_a_gpu_that_is_not_there_is_named() -> None:
    from kindler.errors import ConfigError

    try:
        trained(device="cuda:77")
    except ConfigError as error:
        assert "'cuda:77' was requested" in str(error)  # noqa: PT017 - this file also runs without pytest
    else:
        raise AssertionError("it trained")


def test_a_warm_process_of_torch_has_opened_no_device() -> None:
    _preloaded_without_device("kindler.frameworks.torch.replica:preload", {})


def test_keras_on_torch_trains_on_the_gpu_and_its_warm_process_has_opened_none() -> None:
    _need("keras")
    _preloaded_without_device("kindler.frameworks.keras.replica:preload", {"KERAS_BACKEND": "torch"})
    _train_keras("torch", "variable.value.device.type")


def test_keras_on_jax_trains_on_the_gpu() -> None:
    _need("keras")
    _need("jax")
    _train_keras("jax", "{'gpu': 'cuda'}.get(*2 * [next(iter(variable.value.devices())).platform])")


def _train_keras(backend: str, device: str) -> None:
    """Train on a CPU and on the GPU, with one worker and with two; `device` says where a variable is."""
    code = f"""
        import os
        os.environ["KERAS_BACKEND"] = {backend!r}
        import keras, numpy as np
        import kindler

        class Look(keras.callbacks.Callback):
            def __init__(self, wanted):
                super().__init__()
                self.wanted = wanted

            def on_train_batch_end(self, batch, logs=None):
                devices = {{{device} for variable in self.model.trainable_variables}}
                if devices != {{self.wanted}}:
                    raise RuntimeError(f"weights are on {{devices}}")

        def create(config):
            # A GPU draws other random weights than a CPU does from the same seed.
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
            model.set_weights([np.linspace(-0.5, 0.5, w.size).reshape(w.shape) for w in model.get_weights()])
            model.compile(optimizer="adam", loss="mse")
            return model

        x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        y = x.sum(1, keepdims=True)
        losses = {{}}
        for device, workers in (("cpu", 1), ("auto", 1), ("cpu", 2), ("cuda", 2)):
            wanted = "cpu" if device == "cpu" else "cuda"
            est = kindler.Estimator.from_keras(
                create,
                keras_backend={backend!r},
                device=kindler.Device(device, share=True),
                workers=workers,
            )
            history = est.fit((x, y), epochs=2, batch_size=16, callbacks=[Look(wanted)], verbose=0)
            losses[device, workers] = history["loss"]
            est.evaluate((x, y), batch_size=16, verbose=0)
            assert len(est.predict(x, batch_size=16)) == 64
        for (device, workers), found in losses.items():
            np.testing.assert_allclose(found, losses["cpu", workers], rtol=1e-3)
    """
    _run(textwrap.dedent(code), {})


def _preloaded_without_device(preload: str, environment: dict[str, str]) -> None:
    """The preload leaves CUDA alone: a fork of the process that ran it can use the GPU."""
    code = f"""
        import os
        from kindler.engine import _fork_server_main
        assert _fork_server_main._preload([{preload!r}]) is None
        assert not _fork_server_main.holds_accelerator()
        if os.fork() == 0:
            import torch
            torch.zeros(1, device="cuda").item()
            os._exit(0)
        assert os.wait()[1] == 0
    """
    _run(textwrap.dedent(code), environment)


def _run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Skipped(Exception):
    pass


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        if pytest is not None:
            pytest.skip(f"{package} is not installed")
        raise _Skipped(f"{package} is not installed")


def main(only: str) -> int:
    """Run the tests of this file that have one of these words in their name; the number that failed."""
    tests: dict[str, Callable[[], None]] = {
        name: test
        for name, test in globals().items()
        if name.startswith("test_") and any(word in name for word in only.split(","))
    }
    failed = 0
    for name, test in tests.items():
        try:
            test()
            said = "passed"
        except _Skipped as why:
            said = f"skipped: {why}"
        except BaseException:
            failed, said = failed + 1, f"FAILED\n{traceback.format_exc()}"
        sys.stdout.write(f"{name}: {said}\n")
    return failed


if __name__ == "__main__":
    pytest = None  # type: ignore[assignment]
    words = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    sys.exit(main(words) if _has_cuda() else "there is no CUDA device")
