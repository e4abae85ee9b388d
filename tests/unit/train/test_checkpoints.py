"""The file of a checkpoint, and the folder of them: whole or passed over, few kept, the newest found."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kindler.errors import ConfigError
from kindler.train.checkpoints import (
    CheckpointFolder,
    CheckpointWarning,
    DamagedCheckpointError,
    Header,
    pack,
    parse,
    read_checkpoint,
    write_checkpoint,
)

HEADER = Header(
    framework="torch",
    epoch=2,
    step=7,
    step_in_epoch=3,
    run="abc",
    first_epoch=1,
    first_step=4,
    counts=(5, 6),
    batch_size=4,
    steps_per_epoch=9,
    seed=3,
    shuffle=False,
    seconds=1.5,
    rows=({"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": float("inf")}),
    callbacks=({"type": "Mine", "state": {"best": 0.5}},),
)


def header(epoch: int, *, step: int = 0, run: str = "r", **figures: float) -> Header:
    rows = ({"epoch": epoch, **figures},) if figures else ()
    return Header(
        framework="torch", epoch=epoch, step=10 * epoch + step, step_in_epoch=step, run=run, rows=rows
    )


@pytest.fixture(params=["disk", "memory://"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder on disk, and one behind a URL."""
    if request.param == "disk":
        yield str(tmp_path / "run")
        return
    fsspec = pytest.importorskip("fsspec")
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


def write(folder: str, *headers: Header, **options: Any) -> None:
    checkpoints = CheckpointFolder(folder, **options)
    for made in headers:
        checkpoints.save(made, lambda made=made: [f"state of {made.step}".encode()])  # type: ignore[misc]
    checkpoints.wait()


def steps(folder: str) -> list[int]:
    """The steps of the checkpoints there are, oldest first."""
    return [found.step for _, found in CheckpointFolder(folder)._headers() if isinstance(found, Header)]


def test_a_file_gives_back_all_that_was_put_in() -> None:
    found = parse(b"".join(pack(HEADER, [b"state"], [b"rank 0", b"", b"rank two"])))

    assert found.header == HEADER
    assert (found.state, found.local_states) == (b"state", (b"rank 0", b"", b"rank two"))


def test_a_file_with_any_byte_changed_or_missing_is_not_whole() -> None:
    whole = b"".join(pack(HEADER, [b"state"], [b"rank 0", b"rank 1"]))

    for place in range(len(whole)):
        with pytest.raises(DamagedCheckpointError):
            parse(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError):
            parse(whole[:place])
    with pytest.raises(DamagedCheckpointError):
        parse(whole + b"more")


def test_a_checkpoint_of_another_format_says_so() -> None:
    whole = b"".join(pack(HEADER, [b"state"]))

    with pytest.raises(DamagedCheckpointError, match="format 9"):
        parse(whole.replace(b'{"format": 1', b'{"format": 9'))


def test_one_file_is_written_and_read_by_its_path(folder: str) -> None:
    write_checkpoint(f"{folder}/mine", HEADER, b"state")

    assert read_checkpoint(f"{folder}/mine").state == b"state"


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"PK weights")

    with pytest.raises(ConfigError, match=r"weights\.pt is not a complete checkpoint.*\n.*load\(\)"):
        read_checkpoint(tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none")


def test_the_newest_is_the_one_written_last(folder: str) -> None:
    assert CheckpointFolder(folder).newest() is None

    write(folder, header(7), header(8))
    write(folder, header(1, run="another"))

    newest = CheckpointFolder(folder).newest()
    assert newest is not None
    assert (newest.header.epoch, newest.header.run) == (1, "another")
    assert parse(newest.data).state == b"state of 10"
    assert read_checkpoint(newest.path).header == newest.header


def test_the_newest_of_a_run_or_of_an_epochs_end_is_found(folder: str) -> None:
    write(folder, header(1), header(2, step=3), header(1, run="another"))

    mine = CheckpointFolder(folder).resume_candidates(lambda h: h.run == "r")
    assert [(found.header.epoch, found.header.ends_epoch) for found in mine] == [(2, False), (1, True)]
    assert [found.header.run for found in CheckpointFolder(folder).resume_candidates()] == ["another"]


def test_the_last_few_and_the_last_of_an_epochs_end_are_kept(folder: str) -> None:
    write(folder, header(1), header(2), *[header(3, step=s) for s in (1, 2, 3)], keep=2)

    assert steps(folder) == [20, 32, 33]


def test_all_are_kept_if_asked_for(folder: str) -> None:
    write(folder, *[header(epoch) for epoch in range(1, 7)], keep=None)

    assert len(steps(folder)) == 6


@pytest.mark.parametrize(("best", "kept"), [("val_loss", 20), ("val_acc", 30), ("max:val_loss", 10)])
def test_the_best_is_kept_besides_the_last(folder: str, best: str, kept: int) -> None:
    figures = [(0.9, 0.1), (0.2, 0.5), (0.3, 0.8), (0.4, 0.7), (0.8, 0.2)]
    write(
        folder,
        *[header(e, val_loss=loss, val_acc=acc) for e, (loss, acc) in enumerate(figures, start=1)],
        keep=1,
        best=best,
    )

    assert steps(folder) == [kept, 50]


def test_the_best_of_an_earlier_run_in_the_folder_counts(folder: str) -> None:
    write(folder, header(1, val_loss=0.1), best="val_loss", keep=1)
    write(folder, header(2, val_loss=0.5), header(3, val_loss=0.4), best="val_loss", keep=1)

    assert steps(folder) == [10, 30]


def test_a_best_metric_that_no_epoch_has_is_named(tmp_path: Path) -> None:
    write(str(tmp_path), header(1, loss=0.5), best="val_auc")  # an epoch that was not validated
    with pytest.raises(
        ConfigError, match=r"Checkpoints\(best=\'val_auc\'\).*available: \['loss', 'val_loss'\]"
    ):
        write(str(tmp_path), header(1, loss=0.5, val_loss=0.6), best="val_auc")
    with pytest.raises(ConfigError, match=r"Checkpoints\(best=\'accuracy\'\).*available: \['loss'\]"):
        write(str(tmp_path), header(1, loss=0.5), best="accuracy")
    with pytest.raises(ConfigError, match="max:val_gain"):
        CheckpointFolder(tmp_path, best="val_gain")


@pytest.mark.parametrize("damage", ["flip", "cut", "cut short", "empty"])
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(tmp_path: Path, damage: str) -> None:
    write(str(tmp_path), header(1), header(2))
    newest = max(tmp_path.iterdir())
    data = bytearray(newest.read_bytes())
    data[-40] ^= 1
    changed = {"flip": data, "cut": data[:-5], "cut short": data[:30], "empty": b""}
    newest.write_bytes(changed[damage])

    with pytest.warns(CheckpointWarning, match=newest.name):
        found = CheckpointFolder(tmp_path).newest()

    assert found is not None
    assert found.header.epoch == 1


def test_a_whole_one_is_found_without_a_warning(folder: str) -> None:
    write(folder, header(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CheckpointFolder(folder).newest() is not None


def test_a_damaged_one_takes_the_place_of_no_other(tmp_path: Path) -> None:
    write(str(tmp_path), header(1), header(2))
    max(tmp_path.iterdir()).write_bytes(b"")

    write(str(tmp_path), header(3), keep=2)

    assert steps(str(tmp_path)) == [10, 30]


def test_what_interrupted_writes_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-000001-epoch-00001-step-000000010.kindler-x1.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's")

    write(str(tmp_path), header(1))

    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-000001-epoch-00001-step-000000010.kindler",
        "notes.txt",
    ]


def test_bytes_are_made_and_written_on_another_thread(tmp_path: Path) -> None:
    seen: list[str] = []
    go_on = threading.Event()

    def state() -> list[bytes]:
        assert go_on.wait(30)
        seen.append(threading.current_thread().name)
        return [b"state"]

    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(header(1), state)
    assert not seen, "save returns before the bytes are made"
    go_on.set()
    checkpoints.wait()

    assert seen == ["kindler-checkpoint"]


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    checkpoints = CheckpointFolder(tmp_path / "file")

    checkpoints.save(header(1), lambda: [b"state"])
    with pytest.raises(OSError, match="file"):
        checkpoints.save(header(2), lambda: [b"state"])
    checkpoints.wait()
