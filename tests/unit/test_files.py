"""Files and folders that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kindler.errors import ConfigError
from kindler.temporary import beside


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
