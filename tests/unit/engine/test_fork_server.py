"""Warm processes: whom they serve, and what their forks take over from the process that asks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from kindler.engine import fork_server
from kindler.engine._fork_server_main import holds_accelerator
from kindler.engine.fork_server import Recipe, start_child
from kindler.engine.job import Job, equal_ranks
from kindler.engine.supervisor import worker_fields
from kindler.temporary import private_folder
from tests.conftest import eventually_none
from tests.faults import kernel
from tests.faults.kernel import Fault, watched

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    fork_server.close()


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files of its own, with a name that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kdl-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def facts(worker: Any) -> list[bytes]:
    """In a child: what it has of the process that asked."""
    mask = os.umask(0)
    told = {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": mask,
        "zone": time.strftime("%Z", time.localtime(0)),
        "tmp": tempfile.gettempdir(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    return [json.dumps(told).encode()]


def ask(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """Have a child call `facts`."""
    child = start_child(recipe, owner=os.getpid(), timeout_s=60, **options)
    target = "tests.unit.engine.test_fork_server:facts"
    job = Job(ranks=equal_ranks(target, 1), threads=1, cwd="/nowhere")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            child.channel.send(
                "job",
                **worker_fields(job, 0, scratch=Path(scratch)),
            )
            while (frame := child.channel.receive(60)).kind == "beat":
                pass  # a busy machine takes its time
            assert frame.kind == "result", frame.fields
            told: dict[str, Any] = json.loads(frame.buffers[0])
            return told
    finally:
        child.close()


def test_a_fork_has_the_environment_of_now_not_that_of_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = Recipe(environment=(("KERAS_BACKEND", "torch"),))
    monkeypatch.setenv("HF_TOKEN", "old")
    monkeypatch.setenv("TO_BE_REMOVED", "1")
    first = ask(recipe)

    monkeypatch.setenv("HF_TOKEN", "new")
    monkeypatch.delenv("TO_BE_REMOVED")
    monkeypatch.setenv("TZ", "XYZ-3")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        second = ask(recipe, environment={"MINE": "2"})
    finally:
        os.umask(before)
        os.sched_setaffinity(0, cpus)

    assert first["parent"] == second["parent"], "the same warm process"
    assert first["environment"]["HF_TOKEN"] == "old"
    assert second["environment"]["HF_TOKEN"] == "new"
    assert first["environment"]["TO_BE_REMOVED"] == "1"
    assert "TO_BE_REMOVED" not in second["environment"]
    assert second["environment"]["MINE"] == "2"
    assert second["environment"]["KERAS_BACKEND"] == "torch", "the recipe's own variables stay"
    assert second["zone"] == "XYZ"
    assert second["cwd"] == str(tmp_path)
    assert second["tmp"] == str(tmp_path)
    assert (second["umask"], first["umask"]) == (0o027, before)
    assert second["cpus"] == [min(cpus)]


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH", "LC_ALL", "TF_ENABLE_ONEDNN_OPTS"]
)
def test_a_variable_that_is_read_at_import_names_another_warm_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    without = Recipe().key()
    monkeypatch.setenv(name, "0")
    with_0 = Recipe().key()
    monkeypatch.setenv(name, "1")

    assert len({without, with_0, Recipe().key()}) == 3


def test_other_variables_keep_the_warm_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Recipe().key()
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")  # importing a library sets it

    assert Recipe().key() == before


def test_a_large_environment_reaches_the_fork_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCH", "x" * 100_000)
    monkeypatch.setenv("MORE", "y" * 100_000)
    monkeypatch.setenv("MOST", "é\udc80" * 20_000)

    told = ask(Recipe())

    assert told["environment"]["MUCH"] == "x" * 100_000
    assert told["environment"]["MOST"] == "é\udc80" * 20_000


def test_the_folder_is_not_used_when_its_name_was_taken_by_somebody_else(short_tmp: Path) -> None:
    taken = short_tmp / f"kindler-{os.geteuid()}"
    taken.mkdir()
    taken.chmod(0o777)

    assert ask(Recipe())["pid"]
    assert not list(taken.iterdir())
    assert (private_folder() / f"owner-{os.getpid()}").is_dir()


@only_root
def test_a_socket_of_somebody_else_is_not_spoken_to(short_tmp: Path) -> None:
    """Even where another user got a socket into the folder, the request goes to a process of our own."""
    folder = private_folder() / f"owner-{os.getpid()}"
    folder.mkdir(mode=0o777)
    path = folder / f"{Recipe().key()}.sock"
    program = f"""
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind({str(path)!r})
os.chmod({str(path)!r}, 0o777)
os.setuid({NOBODY})
listener.listen(8)  # its user is the one that counts
print("listening", flush=True)
listener.settimeout(60)
connection, _ = listener.accept()
print(len(connection.recv(1 << 16)), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as thief:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "listening\n"
        told = ask(Recipe())
        assert thief.stdout.readline() == "0\n", "it received nothing"

    assert told["parent"] != thief.pid


@only_root
def test_a_request_of_somebody_else_is_closed_on(short_tmp: Path) -> None:
    ask(Recipe())
    path = private_folder() / f"owner-{os.getpid()}" / f"{Recipe().key()}.sock"
    for opened in (short_tmp, *path.parents[:2], path):
        opened.chmod(0o777)
    program = f"""
import os, socket
os.setuid({NOBODY})
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(30)
sock.connect({str(path)!r})
reading, writing = os.pipe()
try:
    socket.send_fds(sock, [b"+"], [reading, writing])
    print(sock.recv(100))
except OSError as error:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout == "b''\n", done.stderr
    for closed in path.parents[:2]:
        closed.chmod(0o700)
    assert ask(Recipe())["pid"], "it still serves its own user"


def test_giving_up_while_a_warm_process_imports_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    recipe = Recipe(preload=("endless",))
    gave_up = threading.Event()
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            start_child(recipe, owner=os.getpid(), timeout_s=600, wanted=lambda: not gave_up.is_set())
        except BaseException as exc:
            failed.append(exc)

    sys.path.insert(0, str(tmp_path))
    try:
        thread = threading.Thread(target=fetch)
        thread.start()
        while not fork_server._started:
            thread.join(0.01)
        warm = fork_server._started[0]
        gave_up.set()
        thread.join(30)
        fork_server.retire()
    finally:
        sys.path.remove(str(tmp_path))

    assert isinstance(failed[0], fork_server.RequestCancelledError)
    assert warm.wait(30) == -9


def test_a_driver_that_is_killed_while_its_workers_start_leaves_no_folder(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "owner = os.getppid()\n"
        "os.kill(owner, signal.SIGKILL)\n"
        "status = Path(f'/proc/{owner}/stat')\n"
        "while status.exists() and ' Z ' not in status.read_text():\n"
        "    pass\n"
    )
    program = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
from kindler.engine.fork_server import Recipe, start_child
from kindler.temporary import Folder
folder = Folder("kindler-scratch-")
(folder.path / "rows").write_text("rows")
start_child(Recipe(preload=("slow",)), owner=os.getpid(), timeout_s=60)
"""
    killed = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp)}, timeout=60
    )

    assert killed.returncode == -9
    assert not eventually_none(lambda: list(tmp.glob("kindler-scratch-*")))


def test_a_warm_process_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kindler.limits.FORK_ANSWER_S", 0.1)
    first = ask(Recipe())
    warm = fork_server._started[0]
    os.kill(warm.pid, 19)  # SIGSTOP
    try:
        fork_server.retire()
        second = ask(Recipe())
    finally:
        os.kill(warm.pid, 18)  # SIGCONT

    assert first["parent"] != second["parent"], "nobody reaches it again"


def test_a_peer_of_this_user_is_recognised() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert fork_server.peer_is_this_user(one)


def test_a_device_that_is_open_is_noticed(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    assert not holds_accelerator((str(device),))

    with device.open():
        assert holds_accelerator((str(device),))


@pytest.fixture
def executors() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that own fork servers, as Spark's Python daemons do."""
    with ExitStack() as stack:

        def executor() -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(fork_server.close, process.pid)
            stack.callback(process.kill)
            return process

        yield executor


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_another_executor_takes_over_the_warm_process_of_one_that_died(
    executors: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "of the first")
    first, second = executors(), executors()
    with closing(start_child(Recipe(), owner=first.pid, timeout_s=60, run="a run")) as child:
        server = psutil.Process(child.pid).ppid()
        end(first)
        assert child.wait(60) == (-9, True), "children end with the executor"

    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "of the second")
    third = executors()
    with closing(start_child(Recipe(), owner=third.pid, timeout_s=60, run="another")) as child:
        assert psutil.Process(child.pid).ppid() != server
    with closing(start_child(Recipe(), owner=second.pid, timeout_s=60, run="a run")) as child:
        assert psutil.Process(child.pid).ppid() == server
        fourth = executors()
        with closing(start_child(Recipe(), owner=fourth.pid, timeout_s=60, run="a run")) as other:
            assert psutil.Process(other.pid).ppid() != server, "its executor is alive"


def test_the_warm_process_of_an_executor_that_ends_without_workers_ends_at_once(
    executors: Callable[[], subprocess.Popen[bytes]],
) -> None:
    first, second = executors(), executors()
    with closing(start_child(Recipe(), owner=first.pid, timeout_s=60)) as child:
        server = psutil.Process(child.pid).ppid()
        child.kill()
        child.wait(60)

    end(first)
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], timeout=60)

    with closing(start_child(Recipe(), owner=second.pid, timeout_s=60)) as child:
        assert psutil.Process(child.pid).ppid() != server


def test_a_warm_process_that_nobody_takes_over_ends(
    executors: Callable[[], subprocess.Popen[bytes]],
) -> None:
    first = executors()
    with closing(start_child(Recipe(), owner=first.pid, timeout_s=60)) as child:
        server = psutil.Process(psutil.Process(child.pid).ppid())
        end(first)

    gone, alive = psutil.wait_procs([server], timeout=120)  # it waits for others meanwhile

    assert gone
    assert not alive


@pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())
def test_a_fork_that_fails_is_tried_again_and_ends_no_other_worker() -> None:
    def work(talk: Connection) -> None:
        first = start_child(Recipe(), owner=os.getpid(), timeout_s=60)
        talk.send("first")
        talk.recv()
        second = start_child(Recipe(), owner=os.getpid(), timeout_s=60)
        parents = {psutil.Process(child.pid).ppid() for child in (first, second)}
        talk.send(len(parents))
        fork_server.close()

    with watched(work, lambda point: (point.kind, point.role) == ("fork", "child")) as program:
        assert program.hear(60) == "first"
        program.arm(Fault(0, "error"))
        program.talk.send("go on")
        assert program.hear(60) == 1, "the same fork server has both"
        assert program.hit is not None
        assert program.ended(60), program.left()
