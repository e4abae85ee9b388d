"""Every file of examples/ runs as a program and does what it says.

Those with Keras do in tests/spark_programs, where other programs start it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.in_turn import Printed

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
TESTED = {
    "custom_callback.py",
    "first_steps.py",
    "first_steps_keras.py",
    "gan.py",
    "huggingface_text.py",
    "imbalanced.py",
    "keras_digits.py",
    "keras_text.py",
    "lightning_module.py",
    "local_arrays.py",
    "lost_worker.py",
    "mnist_spark.py",
    "parquet_to_parquet.py",
    "png_images.py",
    "quickstart.py",
    "store_and_runtime.py",
}

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def output_of(example: str, *arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """What the example prints; it has to end well and without a warning of ours."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT / "src")))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern + r"\D*([\d.]+\d)", text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


@pytest.fixture(scope="module")
def on_torch(printed: Printed) -> Printed:
    """What examples printed that ran one after another."""
    return printed


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED


@pytest.mark.spark
def test_quickstart_is_accurate_scores_the_frame_and_saves_a_plot(on_torch: Printed, folder: Path) -> None:
    printed = on_torch("quickstart.py")

    assert number("test accuracy", printed) > 0.95
    assert re.search(r"\|label\|predicted\|", printed)
    assert f"plot: {folder / 'training.png'}" in printed
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "spark-warehouse").exists()


@pytest.mark.spark
def test_first_steps(on_torch: Printed) -> None:
    printed = on_torch("first_steps.py")

    assert number("'accuracy'", printed) > 0.9
    (shown,) = re.findall(r"^```text\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    last_digits = re.compile(r"(?<=\.\d)\d+|\d+(?=\|\n)")  # which other processors may compute otherwise
    assert last_digits.sub("", shown) in last_digits.sub("", printed)


def test_a_stored_model_answers_in_the_runtime_and_as_the_readme_asks_its_server(tmp_path: Path) -> None:
    assert output_of("store_and_runtime.py", cwd=tmp_path).count("[0 1 2 3 4]") == 2

    serve, ask = re.findall(r"^\$ (kindler serve.*) &\n\$ (curl.*)$", README.read_text(), re.MULTILINE)[0]
    command = [sys.executable, "-m", "kindler.cli", *shlex.split(serve.replace("8000", "0"))[1:]]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().split()[-1]
            asked = shlex.split(ask.replace("http://127.0.0.1:8000", url))
            reply = subprocess.run([*asked, "--silent"], capture_output=True, text=True, timeout=60)
        finally:
            server.terminate()
    scores = json.loads(reply.stdout)["result"]
    assert [row.index(max(row)) for row in scores] == [0, 1, 2, 3, 4]


@pytest.mark.spark
def test_a_model_of_hugging_face_learns_text_of_a_frame(on_torch: Printed) -> None:
    printed = on_torch("huggingface_text.py")

    assert number("test accuracy", printed) > 0.95
    assert "scored: ['text', 'label', 'logits'], 100 rows" in printed


def test_a_gan_learns_a_ring(on_torch: Printed) -> None:
    assert number("mean distance from the ring", on_torch("gan.py")) < 0.3


def test_a_lightning_module_is_accurate(on_torch: Printed) -> None:
    assert number("validation accuracy", on_torch("lightning_module.py")) > 0.8


@pytest.mark.spark
@pytest.mark.skipif(not (SHARED / "cifar10-mini").is_dir(), reason="no CIFAR-10 in ../shared/data")
def test_images_are_learned_from_pngs_in_a_frame(on_torch: Printed) -> None:
    printed = on_torch("png_images.py")

    assert number("test accuracy", printed) > 0.2
    assert "scored: ['png', 'prediction'], 5 rows" in printed


@pytest.mark.spark
def test_mnist_learns_from_a_few_images(mnist: Path, on_torch: Printed) -> None:
    assert number("test accuracy", on_torch("mnist_spark.py")) > 0.6


def test_a_lost_worker_costs_nothing_of_the_result(on_torch: Printed) -> None:
    printed = on_torch("lost_worker.py")

    first, second = re.findall(r"accuracy by epoch: (.*)", printed)
    assert first == second
    assert "same weights: True" in printed


def test_parquet_to_parquet(on_torch: Printed) -> None:
    assert number("mean absolute error", on_torch("parquet_to_parquet.py")) < 0.2


def test_local_arrays_need_no_spark(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ImportError('this example must not need Spark')")
    printed = output_of("local_arrays.py", cwd=tmp_path, path=(tmp_path,))

    assert number("accuracy", printed) > 0.9
    assert number("AUC", printed) > 0.95


def test_class_weights_find_more_of_a_rare_class(on_torch: Printed) -> None:
    plain, weighted = (
        json.loads(found.replace("'", '"'))
        for found in re.findall(r"^(?:plain|weighted) (.*)", on_torch("imbalanced.py"), re.M)
    )
    assert weighted["recall"] > plain["recall"] + 0.1
    assert min(plain["auc"], weighted["auc"]) > 0.75


def test_custom_callback_stops_early_and_keeps_the_best(on_torch: Printed) -> None:
    printed = on_torch("custom_callback.py")

    assert "no better for 2 epochs" in printed
    assert number("of 30 epochs, best accuracy", printed) > 0.9
