"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kindler.errors import ConfigError
from kindler.temporary import beside, sweep
from tests.faults import kernel
from tests.faults.kernel import FILES, Fault, watched


def write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "one").write_text(text)


def test_a_folder_that_came_while_another_was_written_is_not_deleted(tmp_path: Path) -> None:
    target = tmp_path / "out"

    with pytest.raises(OSError, match="not empty"), beside(target) as unfinished:  # noqa: PT012
        write(unfinished, "mine")
        write(target, "of somebody else")

    assert (target / "one").read_text() == "of somebody else"
    assert list(tmp_path.iterdir()) == [target]


def test_an_existing_folder_is_replaced_only_if_that_was_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "out", "before")

    with pytest.raises(ConfigError, match="not overwritten"), beside(tmp_path / "out"):
        pass
    with beside(tmp_path / "out", overwrite=True) as unfinished:
        write(unfinished, "after")

    assert (tmp_path / "out" / "one").read_text() == "after"


def test_what_failed_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "out", "before")

    with pytest.raises(KeyError, match="k"), beside(tmp_path / "out", overwrite=True) as unfinished:  # noqa: PT012
        write(unfinished, "half")
        raise KeyError("k")

    assert (tmp_path / "out" / "one").read_text() == "before"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())
@pytest.mark.parametrize("kind", ["kill", "error"])
def test_a_folder_is_there_at_each_moment_of_being_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "here" / "out"

    def replace(_: object) -> None:
        with beside(target, overwrite=True) as unfinished:
            write(unfinished, "after")

    def run(fault: Fault | None) -> int:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        write(target, "before")
        counts = lambda point: "/out" in point.path  # noqa: E731
        with watched(replace, counts, calls=FILES, fault=fault) as program:
            assert program.ended(60), program.left()
        assert (target / "one").read_text() in ("before", "after")
        sweep()
        assert list(target.parent.iterdir()) == [target]
        return len(program.points)

    count = run(None)
    assert count > 5
    for k in range(count):
        run(Fault(k, kind))
