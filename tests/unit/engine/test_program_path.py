"""Which module a name means to a process that runs a part of the driver's program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kindler.engine.placement import merged_path, program_path

LIBRARY = ["/usr/lib/python311.zip", "/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload"]


def everything(path: str) -> bool:
    return True


def test_the_programs_folders_come_before_those_of_the_process_in_the_programs_order() -> None:
    found = merged_path(["/cwd", "/proj", *LIBRARY], ["/proj", "/python-path", *LIBRARY], everything)

    assert found == ["/proj", "/python-path", "/cwd", *LIBRARY]


def test_libraries_stay_those_of_the_process_whose_python_may_be_another_one() -> None:
    own = ["/opt/lib/python312.zip", "/opt/lib/python3.12", "/opt/lib/python3.12/site-packages"]

    found = merged_path(own, ["/proj", *LIBRARY, "/venv/site-packages", "/appended"], everything)

    assert found == ["/proj", *own, *LIBRARY, "/venv/site-packages", "/appended"]


def test_folders_that_this_machine_does_not_have_are_left_out() -> None:
    assert merged_path(["/own"], ["/proj", *LIBRARY, "/more"], lambda path: path == "/more") == [
        "/own",
        "/more",
    ]


def test_a_process_with_the_same_path_keeps_it() -> None:
    path = ["/proj", *LIBRARY, "/venv/site-packages"]

    assert merged_path(path, path, everything) == path


def test_a_notebook_that_has_changed_its_folder_still_names_the_one_it_began_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.getcwd()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(tmp_path)

    assert program_path()[:2] == (str(tmp_path), before)
