"""The commands of examples/resnet_cifar/README.md, on a few records: CIFAR-10's, or random ones."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkout import PYTHONPATH, ROOT
from tests.conftest import SHARED
from tests.whole import whole_only

EXAMPLE = ROOT / "examples" / "resnet_cifar"
README = (EXAMPLE / "README.md").read_text()
RECORD, RECORDS = 3073, 40
STEPS = 5  # of an epoch: five files of 40 records in batches of 40
SMALL = "--resnet_size=8 --batch_size=40 --log_steps=2"
LOSSES = re.compile(r"^(?:\[(\w+ \d+)\] )?step \d+: loss (.*)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(900)


def block_of(heading: str) -> list[str]:
    """The commands of a section, block by block."""
    section = re.split(r"^## ", README, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading))
    return re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)


EXPORTS, TRAIN_ALONE = block_of("One node")[0].split("$ python ")


def free_places() -> list[str]:
    """Addresses of two ports that nobody has now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("localhost", 0))
        other.bind(("localhost", 0))
        return [f"localhost:{held.getsockname()[1]}" for held in (one, other)]


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        real = SHARED / "cifar10-mini" / name
        if real.is_file():
            records = np.fromfile(real, np.uint8, RECORD * RECORDS).reshape(RECORDS, RECORD)
        else:
            records = random.integers(0, 256, (RECORDS, RECORD), dtype=np.uint8)
            records[:, 0] = random.integers(0, 10, RECORDS)
        records.tofile(folder / name)
    return folder


class Shell:
    """Runs blocks of the README with few records and a small network."""

    def __init__(self, cifar: Path, folder: Path) -> None:
        self.folder = folder
        self.export = folder / "export"
        self._changes = {
            "/path/to/examples/resnet_cifar": str(EXAMPLE),
            "/path/to/cifar-10-batches-bin": str(cifar),
            **dict(zip(("localhost:2222", "localhost:2223"), free_places(), strict=True)),
        }

    def start(self, *blocks: str) -> subprocess.Popen[str]:
        text = re.sub(r"^\$ ", "", "\n".join([EXPORTS, *blocks]), flags=re.MULTILINE)
        for known, here in self._changes.items():
            text = text.replace(known, here)
        text = text.replace("kindler submit", "kindler submit --start-timeout 600")  # of a busy machine
        text = re.sub(r"(--train_epochs[= ]1)", rf"\1 {SMALL} --export_dir={self.export}", text)
        return subprocess.Popen(
            ["bash", "-eu", "-c", text],
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": PYTHONPATH,
                "PYSPARK_PYTHON": sys.executable,
                "XDG_DATA_HOME": str(self.folder),
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def shell(cifar: Path, tmp_path: Path) -> Shell:
    return Shell(cifar, tmp_path)


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output: str) -> dict[str, list[str]]:
    """The loss of every step, by node."""
    nodes: dict[str, list[str]] = {}
    for node, values in LOSSES.findall(output):
        nodes.setdefault(node, []).extend(values.split())
    return nodes


def check_trained_alike(output: str) -> None:
    chief, worker = losses(output).values()

    assert len(chief) == STEPS
    assert chief == worker
    assert len(set(re.findall(r"test loss .*", output))) == 1


def check_exported_once(shell: Shell) -> None:
    assert [path.parent for path in shell.folder.rglob("saved_model.pb")] == [shell.export]


@whole_only
def test_two_nodes_train_in_step_and_export_one_model(shell: Shell) -> None:
    output = output_of(shell.start(block_of("Two processes")[2]))

    check_trained_alike(output)
    check_exported_once(shell)


@whole_only
def test_one_node_and_two_processes_train(shell: Shell) -> None:
    (alone,) = losses(output_of(shell.start(f"python {TRAIN_ALONE}"))).values()
    assert len(alone) == STEPS
    check_exported_once(shell)

    processes = [shell.start(block) for block in block_of("Two processes")[:2]]
    first, second = map(output_of, processes)

    assert losses(first)[""] == losses(second)[""]
    assert len(losses(first)[""]) == STEPS
    check_exported_once(shell)
    load = f"import tensorflow as tf; model = tf.saved_model.load({str(shell.export)!r})"
    call = "print(model.signatures['serving_default'](tf.zeros([2, 32, 32, 3]))['dense'].shape)"
    loaded = subprocess.run([sys.executable, "-c", f"{load}; {call}"], capture_output=True, text=True)
    assert loaded.stdout.strip() == "(2, 10)"


@whole_only
def test_a_standalone_cluster_trains_by_spark_submit_and_by_kindler_submit(shell: Shell) -> None:
    by_spark, by_kindler = block_of("Spark")
    up, _, down = by_spark.partition("\n# end the Spark cluster\n")
    java = "export JAVA_HOME=$(python -c 'from kindler.spark.java import find_java; print(find_java().home)')"
    assert java in README
    try:
        check_trained_alike(output_of(shell.start(java, up)))
        check_exported_once(shell)
        master = output_of(shell.start("kindler cluster status")).splitlines()[0]
        check_trained_alike(output_of(shell.start(f"export MASTER={master}", by_kindler)))
    finally:
        ended = output_of(shell.start(down))
    assert "3 processes ended" in ended


@whole_only
@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_an_estimator_trains_the_same_network(shell: Shell, framework: str) -> None:
    command = block_of("With an estimator")[0].replace("torch", framework)
    command = command.replace(
        "--resnet_size=20 --train_epochs=1", "--resnet_size=8 --rows=80 --batch_size=40"
    )

    assert re.search(r"test accuracy: \d", output_of(shell.start(command)))
