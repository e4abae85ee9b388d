"""Folders that are this user's alone, and go away also when their process is killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kindler.errors import ConfigError
from kindler.temporary import Folder, private_folder, sweep

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can be made by root alone")


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_shared_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = private_folder()

    assert path == tmp_path / f"kindler-{os.geteuid()}"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o700
    assert private_folder() == path


def _of_somebody_else(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, NOBODY, NOBODY)


def _writable_by_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def _a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _a_file(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(_of_somebody_else, marks=only_root),
        _writable_by_all,
        _a_link,
        _a_dangling_link,
        _a_file,
    ],
)
def test_a_name_that_was_taken_before_is_left_alone(tmp_path: Path, take: object) -> None:
    name = f"kindler-{os.geteuid()}"
    take(tmp_path / name)  # type: ignore[operator]

    assert private_folder() == tmp_path / f"{name}-1"
    assert not (tmp_path / "nowhere").exists()


def test_when_all_names_are_taken_the_error_says_what_to_do(tmp_path: Path) -> None:
    name = f"kindler-{os.geteuid()}"
    for ending in ("", *(f"-{number}" for number in range(1, 10))):
        (tmp_path / f"{name}{ending}").touch()

    with pytest.raises(
        ConfigError, match="(?s)belong to, or can be changed by, another user.*Hint: .*TMPDIR"
    ):
        private_folder()


def test_a_folder_that_others_could_only_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / f"kindler-{os.geteuid()}"
    path.mkdir(mode=0o755)

    assert private_folder() == path
    assert stat.S_IMODE(path.lstat().st_mode) == 0o700


def test_a_folder_goes_with_its_block_and_stays_during_a_sweep(tmp_path: Path) -> None:
    with Folder("kindler-test-", tmp_path) as path:
        (path / "file").touch()
        sweep()
        assert (path / "file").exists()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    assert not path.exists()
    assert [p.name for p in (private_folder() / "folders").iterdir()] == [".lock"]


def test_what_a_killed_process_left_goes_with_the_next_folder(tmp_path: Path) -> None:
    code = f"""
import os, signal, tempfile
from pathlib import Path
tempfile.tempdir = {str(tmp_path)!r}
from kindler.temporary import Folder
folder = Folder("kindler-killed-")
(folder.path / "rows").write_text("rows")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert [p.name for p in tmp_path.glob("kindler-killed-*/rows")] == ["rows"]

    with Folder("kindler-next-"):
        assert not list(tmp_path.glob("kindler-killed-*"))


def test_a_fork_leaves_its_parents_folder_alone(tmp_path: Path) -> None:
    folder = Folder("kindler-test-")
    pid = os.fork()
    if pid == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(pid, 0)

    assert folder.path.exists()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
