"""How fast does PyTorch train on a GPU, against a hand-written loop with pinned batches?

The MLP 784-256-256-10 with batches of 256 (its kernels are so short that launching them is most of a step),
and a transformer of 12 layers, 768 wide, in bfloat16 (its kernels keep the GPU busy). AdamW, accuracy counted
on the device; steps per second of the last epochs. Seconds to the first step of a session. Keras on torch and
on JAX against their own `fit`. Scoring an array against a loop with pinned batches. Needs a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds, seconds

from kindler import Device, Optimization

MLP_BATCH, MLP_STEPS = 256, 300
SEQUENCE_BATCH, SEQUENCE_STEPS, TOKENS, WORDS = 32, 60, 128, 1_000
EPOCHS = 4
SCORED, SCORE_BATCH = 256_000, 4_096
ACCUMULATED = Optimization(accumulation_steps=4, scheduler_step="step")


def main() -> None:
    given = arguments(__doc__, repeats=2)
    if not _has_gpu():
        print("gpu: there is no CUDA device on this machine", flush=True)
        return
    report = Report("gpu", "steps/s of training on one GPU", quick=given.quick)
    small, large = mlp_rows(), sequences()
    measured = rounds(
        {
            "MLP, hand-written": lambda: by_hand(mlp, *small, MLP_BATCH),
            "MLP": lambda: kindler(mlp, *small, MLP_BATCH, device=Device("cuda", cache=False)),
            "MLP, rows on the GPU": lambda: kindler(mlp, *small, MLP_BATCH),
            "MLP, graphs": lambda: kindler(mlp, *small, MLP_BATCH, device=Device("cuda", compile="graphs")),
            "transformer, hand-written": lambda: by_hand(transformer, *large, SEQUENCE_BATCH, bf16=True),
            "transformer": lambda: kindler(
                transformer, *large, SEQUENCE_BATCH, device=Device("cuda", precision="bf16")
            ),
        },
        repeats=given.repeats,
        warm_up=False,
    )
    for name, values in measured.items():
        report.figure(name, values, "steps/s")
    hand = measured["MLP, hand-written"]
    report.ratio("MLP / hand-written", measured["MLP"], hand, at_least=0.95)
    report.ratio("MLP, graphs / hand-written", measured["MLP, graphs"], hand, at_least=5.0)
    resident = measured["MLP, rows on the GPU"]
    report.ratio("MLP, rows on the GPU / hand-written", resident, hand, at_least=1.2)
    report.ratio("MLP, rows on the GPU / copied", resident, measured["MLP"])
    report.ratio(
        "transformer / hand-written",
        measured["transformer"],
        measured["transformer, hand-written"],
        at_least=0.98,
    )
    _graphs_report(report, given.repeats)
    _first_report(report, given.repeats)
    _keras_report(report, given.repeats)
    _predict_report(report, given.repeats)
    report.finish(device=_device())


def _graphs_report(report: Report, repeats: int) -> None:
    """Steps that are recorded up to their gradients."""
    cases = {
        "MLP, accumulation 4, schedule": (3.0, 1, {"optimization": ACCUMULATED, "scheduler": falling}),
        "MLP, two workers on the GPU": (2.0, 2, {}),
    }
    for case, (at_least, workers, options) in cases.items():
        ways = {}
        for way, compile_ in (("eager", None), ("graphs", "graphs")):
            device = Device("cuda", share=workers > 1, cache=False, compile=compile_)
            ways[way] = partial(kindler, mlp, *mlp_rows(), MLP_BATCH, device, workers=workers, **options)
        measured = rounds(ways, repeats=repeats, warm_up=False)
        for way, values in measured.items():
            report.figure(f"{case}, {way}", values, "steps/s")
        report.ratio(f"{case}: graphs / eager", measured["graphs"], measured["eager"], at_least=at_least)


def falling(optimizer: Any, config: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * MLP_STEPS)


def _keras_report(report: Report, repeats: int) -> None:
    """Keras's own `fit` and Kindler's, in a process of each backend."""
    for backend in ("torch", "jax"):
        if not (_installed("keras") and _installed(backend)):
            continue
        measured = rounds(
            {
                f"Keras on {backend}, {way}": lambda backend=backend, way=way: _in_process(
                    f"keras_rate({way!r}, {backend!r})",
                    KERAS_BACKEND=backend,
                    XLA_PYTHON_CLIENT_PREALLOCATE="false",
                )
                for way in ("model.fit", "kindler")
            },
            repeats=repeats,
            warm_up=False,
        )
        plain, ours = measured.values()
        for name, values in measured.items():
            report.figure(name, values, "rows/s")
        report.ratio(f"Keras on {backend}: kindler / model.fit", ours, plain, at_least=1.0)


def _first_report(report: Report, repeats: int) -> None:
    """The first step of a session, and that of a hand-written loop, whose process is as new as the worker.

    Both begin with the import of PyTorch and the start of CUDA.
    """
    measured = rounds(
        {
            "first step of a session": lambda: _in_process("first_step()"),
            "first step of a new hand-written loop": lambda: seconds(lambda: _in_process("one_step()")),
        },
        repeats=repeats,
        warm_up=False,
    )
    first, by_hand_too = measured.values()
    for name, values in measured.items():
        report.figure(name, values, "s")
    beyond = [whole - own for whole, own in zip(first, by_hand_too, strict=True)]
    report.limit("first step of a session, minus that of a hand-written loop", beyond, "s", at_most=5.0)


def first_step() -> float:
    """Seconds from the first `fit` of this process to the end of its first step."""
    import tempfile

    import torch

    from kindler import Estimator
    from kindler.callbacks import Callback

    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "first"

        class Clock(Callback):
            def on_step_end(self, run: Any) -> None:
                if run.step == 1:
                    torch.cuda.synchronize()
                    note.write_text(str(time.time()))

        estimator = Estimator.from_torch(
            model=mlp,
            optimizer=torch.optim.AdamW,
            loss=torch.nn.CrossEntropyLoss(),
            workers=1,
            engine="local",
            device="cuda",
        )
        began = time.time()
        estimator.fit(mlp_rows(), epochs=1, batch_size=MLP_BATCH, callbacks=[Clock()], verbose=0)
        return float(note.read_text()) - began


def one_step() -> float:
    """The loss of one hand-written step."""
    import torch

    x, y = (torch.from_numpy(column[:MLP_BATCH]).cuda() for column in mlp_rows())
    made = mlp().cuda()
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    loss = torch.nn.CrossEntropyLoss()(made(x), y)
    loss.backward()
    optimizer.step()
    return float(loss)


def _in_process(call: str, **environment: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", f"import gpu; print(gpu.{call})"],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def keras_rate(way: str, backend: str) -> float:
    """Rows/s of the last epochs of a Keras model, in a process of its own."""
    import keras
    import numpy as np

    def create(config: Any) -> Any:
        layers = [keras.layers.Input((WIDTH,)), *(keras.layers.Dense(256, "relu") for _ in range(2))]
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
        return model

    x, y = mlp_rows()
    if way == "kindler":
        from kindler import Estimator

        estimator = Estimator.from_keras(
            model=create, keras_backend=backend, workers=1, engine="local", device="cuda"
        )
        history = estimator.fit((x, y), epochs=EPOCHS, batch_size=MLP_BATCH, verbose=0)
        return median(history["rows_per_s"][1:])

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends = [time.perf_counter()]

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    create({}).fit(x, y, epochs=EPOCHS, batch_size=MLP_BATCH, verbose=0, callbacks=[clock])
    return len(x) / median(np.diff(clock.ends)[1:])


def _predict_report(report: Report, repeats: int) -> None:
    measured = rounds(
        {"predict, hand-written": scored_by_hand, "predict": scored}, repeats=repeats, warm_up=False
    )
    for name, values in measured.items():
        report.figure(name, values, "rows/s")
    report.ratio(
        "predict / hand-written", measured["predict"], measured["predict, hand-written"], at_least=0.9
    )


def score_rows() -> Any:
    """Rows to score."""
    import numpy as np

    return np.random.default_rng(0).random((SCORED, WIDTH), dtype=np.float32)


def scored() -> float:
    """Rows/s of `predict` over an array, once the model is loaded."""
    import torch

    from kindler import Estimator

    x = score_rows()
    estimator = Estimator.from_torch(model=mlp, loss=torch.nn.CrossEntropyLoss(), workers=1, device="cuda")
    estimator.predict(x[:SCORE_BATCH], batch_size=SCORE_BATCH)
    began = time.perf_counter()
    estimator.predict(x, batch_size=SCORE_BATCH)
    return SCORED / (time.perf_counter() - began)


def scored_by_hand() -> float:
    """The same of a loop with pinned batches."""
    import numpy as np
    import torch

    rows, model, outputs = torch.from_numpy(score_rows()), mlp().cuda().eval(), []
    with torch.inference_mode():
        model(rows[:SCORE_BATCH].cuda())
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, SCORED, SCORE_BATCH):
            batch = rows[start : start + SCORE_BATCH].pin_memory().cuda(non_blocking=True)
            outputs.append(model(batch).cpu().numpy())
        np.concatenate(outputs)
    return SCORED / (time.perf_counter() - began)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def mlp() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def transformer() -> Any:
    import torch
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, 768)
            layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 12)
            self.head = nn.Linear(768, CLASSES)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    torch.manual_seed(0)
    return Classifier()


def mlp_rows() -> tuple[Any, Any]:
    import numpy as np

    random, count = np.random.default_rng(0), MLP_BATCH * MLP_STEPS
    return random.random((count, WIDTH), np.float32), random.integers(0, CLASSES, count)


def sequences() -> tuple[Any, Any]:
    import numpy as np

    random, count = np.random.default_rng(0), SEQUENCE_BATCH * SEQUENCE_STEPS
    return random.integers(0, WORDS, (count, TOKENS)), random.integers(0, CLASSES, count)


def kindler(
    model: Any, x: Any, y: Any, batch: int, device: str | Device = "cuda", *, workers: int = 1, **options: Any
) -> float:
    """Steps/s of an Estimator."""
    import torch

    from kindler import Estimator

    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW,
        loss=torch.nn.CrossEntropyLoss(),
        metrics="accuracy",
        workers=workers,
        engine="local",
        device=device,
        **options,
    )
    history = estimator.fit((x, y), epochs=EPOCHS, batch_size=batch, verbose=0)
    return median(rows / batch for rows in history["rows_per_s"][1:])


def by_hand(model: Any, x: Any, y: Any, batch: int, *, bf16: bool = False) -> float:
    """Steps/s of the loop that one would write."""
    import torch

    made = model().cuda()
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    loss_of = torch.nn.CrossEntropyLoss()
    rows, labels = torch.from_numpy(x), torch.from_numpy(y)
    took = []
    for _ in range(EPOCHS):
        order = torch.randperm(len(rows))
        right = torch.zeros((), device="cuda", dtype=torch.int64)
        total = torch.zeros((), device="cuda")
        began = time.perf_counter()
        for start in range(0, len(rows), batch):
            places = order[start : start + batch]
            inputs = rows[places].pin_memory().cuda(non_blocking=True)
            targets = labels[places].pin_memory().cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                outputs = made(inputs)
                loss = loss_of(outputs, targets)
            loss.backward()
            optimizer.step()
            right += (outputs.argmax(dim=1) == targets).sum()
            total += loss.detach()
        right.item()
        took.append(time.perf_counter() - began)
    return len(rows) / batch / median(took[1:])


def _has_gpu() -> bool:
    # Asked in another process: workers cannot be forked from one that has asked.
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name(0))


if __name__ == "__main__":
    main()
