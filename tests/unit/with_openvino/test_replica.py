"""Models of OpenVINO: what is compiled, once a host and for how many threads, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.frameworks.openvino.replica import OpenvinoReplica, cache_folder, compiled
from tests.openvino.models import classifier

IMAGES = np.random.default_rng(0).random((23, 3, 8, 8)).astype("float32")


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_host_compiles_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = classifier(tmp_path / "net.xml", [4, 3, 8, 8])
    spec = OpenvinoReplica.make_spec(model_path=path)
    expected = OpenvinoReplica(spec).predict((IMAGES,))[0]
    [blob] = cache_folder().glob("*.blob")

    again = compiled(spec, 1)
    assert again.get_property("LOADED_FROM_CACHE")
    assert again.get_property("INFERENCE_NUM_THREADS") == 1
    close(OpenvinoReplica(spec, threads=1).predict((IMAGES,))[0], expected)
    assert [blob] == list(cache_folder().glob("*.blob"))

    blob.write_bytes(b"damaged")  # costs time, and nothing else
    close(OpenvinoReplica(spec).predict((IMAGES,))[0], expected)


def test_threads_are_what_the_estimator_says_before_what_the_worker_says(tmp_path: Path) -> None:
    path = classifier(tmp_path / "net.xml", [-1, 3, 8, 8])
    told = OpenvinoReplica.make_spec(model_path=path, threads=2)

    assert compiled(told, 1).get_property("INFERENCE_NUM_THREADS") == 2
    assert compiled(OpenvinoReplica.make_spec(model_path=path), 1).get_property("INFERENCE_NUM_THREADS") == 1


INTERRUPTED = """
import gc, signal, sys
from pathlib import Path
from kindler.models.openvino import OpenvinoModel

one, other = OpenvinoModel(Path(sys.argv[1])), OpenvinoModel(Path(sys.argv[1]))
del one
gc.collect()
del other
gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    sys.stdout.write("interrupted")
"""


def test_an_interrupt_after_models_are_gone_is_an_interrupt(tmp_path: Path) -> None:
    path = classifier(tmp_path / "net.xml", [-1, 3, 8, 8])

    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", INTERRUPTED, str(path)], capture_output=True
    )

    assert (done.returncode, done.stdout) == (0, b"interrupted")
