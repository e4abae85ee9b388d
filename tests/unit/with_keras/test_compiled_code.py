"""What one process has compiled with JAX, another one that takes its place finds in a folder of the run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.flavour import FLAVOUR

pytestmark = [pytest.mark.keras, pytest.mark.skipif(FLAVOUR != "jax", reason="a thing of JAX's")]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Path]:
    """Keeps what this compiles in a folder, as a process does when it begins."""
    jax, compiler = importlib.import_module("jax"), importlib.import_module("jax._src.compiler")
    on_jax = importlib.import_module("kindler.frameworks.keras.on_jax")

    def keeps(compile_anew: Any) -> Path:
        jax.clear_caches()
        monkeypatch.setattr(compiler, "backend_compile_and_load", compile_anew)
        on_jax.keep_compiled(tmp_path / "compiled")
        return tmp_path / "compiled"

    return keeps


def calls_back(times: int) -> np.ndarray:
    """The numbers 0, 1, 2, times this on the host."""
    jax = importlib.import_module("jax")
    buffer_callback = importlib.import_module("jax.experimental.buffer_callback").buffer_callback

    def host(_: Any, outputs: Any, numbers: Any) -> None:
        np.copyto(np.asarray(outputs[0]), np.asarray(numbers) * times)

    @jax.jit
    def multiplied(numbers: Any) -> Any:
        return buffer_callback(host, [jax.ShapeDtypeStruct(numbers.shape, numbers.dtype)])(numbers)[0]

    return np.asarray(multiplied(np.arange(3, dtype=np.float32)))


def refuse(*_: Any) -> Any:
    raise AssertionError("it is compiled again")


def test_code_that_calls_back_is_compiled_once_and_calls_the_process_that_runs_it(
    keep: Callable[[Any], Path],
) -> None:
    compile_anew = importlib.import_module("jax._src.compiler").backend_compile_and_load

    keep(compile_anew)
    first = calls_back(2)
    keep(refuse)
    second = calls_back(5)

    np.testing.assert_array_equal(first, [0, 2, 4])
    np.testing.assert_array_equal(second, [0, 5, 10])


@pytest.mark.parametrize("left", [b"", b"half of it"])
def test_code_that_was_not_kept_whole_is_compiled_again(keep: Callable[[Any], Path], left: bytes) -> None:
    compile_anew = importlib.import_module("jax._src.compiler").backend_compile_and_load
    folder = keep(compile_anew)
    calls_back(2)
    for path in folder.iterdir():
        path.write_bytes(left)

    keep(compile_anew)

    np.testing.assert_array_equal(calls_back(3), [0, 3, 6])


def test_a_folder_that_cannot_be_written_changes_nothing(keep: Callable[[Any], Path]) -> None:
    folder = keep(importlib.import_module("jax._src.compiler").backend_compile_and_load)
    folder.rmdir()

    np.testing.assert_array_equal(calls_back(2), [0, 2, 4])
