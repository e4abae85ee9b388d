"""Build the distributions and try them in environments that do not know of the repository.

`python tests/wheels/smoke.py [PYTHON...]` (`make wheels`) builds the source distributions, and the wheels
from them. Every Python from 3.10 to 3.13 that is on PATH or of pyenv installs them with the smallest set of
packages, moves some data and runs the command; then kindler-compat is added.

`python tests/wheels/smoke.py --readme` (`make readme`) does what the README says, block by block, in an empty
environment and an empty folder: its pip line, its programs, its commands. What they print is what the README
shows, but for "..." and the decimals after the fourth, which other processors may compute otherwise. Until
the distributions are on an index, pip finds the wheels through PIP_FIND_LINKS, and PyTorch is installed
first, by the Makefile's exact version, so that a build for CPUs is taken.
"""

from __future__ import annotations

import argparse
import doctest
import glob
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
DISTRIBUTIONS = {
    "kindler": ROOT,
    "kindler_tfrecord": ROOT / "packages/kindler-tfrecord",
    "kindler_compat": ROOT / "packages/kindler-compat",
}
CORE = """
import kindler, numpy as np, os, sys
from importlib.metadata import version
assert "site-packages" in kindler.__file__, kindler.__file__
assert os.path.exists(os.path.join(os.path.dirname(kindler.__file__), "py.typed"))
assert kindler.__version__ == version("kindler") == version("kindler-tfrecord")
shards = kindler.XShards.partition({"x": np.arange(6.0), "y": np.arange(6)}, num_shards=2)
doubled = shards.transform_shard(lambda shard: {name: value * 2 for name, value in shard.items()})
assert np.concatenate([shard["x"] for shard in doubled.collect()]).tolist() == [0, 2, 4, 6, 8, 10]
assert not {"torch", "tensorflow", "pyspark"} & set(sys.modules)
try:
    kindler.init()
except kindler.errors.MissingExtraError as error:
    assert "pip install 'kindler[spark]'" in str(error)
try:
    import kindler.compat.zoo
except kindler.errors.MissingExtraError as error:
    assert "pip install 'kindler[compat]'" in str(error)
kindler.tfrecord.write({"x": np.arange(3)}, "rows.tfrecord", overwrite=True)
assert kindler.tfrecord.read("rows.tfrecord")["x"].to_pylist() == [0, 1, 2]
print(kindler.__version__, sys.version.split()[0], "works")
"""
COMPAT = """
import kindler
import kindler.compat.zoo.orca
from importlib.metadata import version
from kindler import Estimator
from kindler.frameworks.registry import FRAMEWORKS
assert kindler.__version__ == version("kindler-compat")
assert {"tf_graph", "mxnet"} <= set(FRAMEWORKS.names)
assert Estimator.from_graph.__doc__ and FRAMEWORKS.spec("tf_graph").gpus
"""
_FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_LAST_DIGITS = re.compile(r"(?<=\.\d{4})\d+")


@dataclass(frozen=True)
class Step:
    """Something that the README tells its reader to do, and what it shows as its output."""

    kind: str  # "python" or "command"
    text: str
    shown: str = ""


def steps(text: str) -> list[Step]:
    """The programs and the commands of a page, in order. A ```text block is what the program above it prints;
    lines of a ```console block that are not commands are what the command above them prints."""
    found: list[Step] = []
    for fence in _FENCE.finditer(text):
        language, block = fence["language"], fence["text"]
        if language == "python":
            found.append(Step("python", block))
        elif language == "text" and found and found[-1].kind == "python":
            found[-1] = Step("python", found[-1].text, block)
        elif language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                found.append(Step("command", command.partition("   #")[0].strip(), shown))
    return found


def readme() -> tuple[list[str], list[str]]:
    """What its pip lines install, and its programs."""
    found = steps((ROOT / "README.md").read_text())
    commands = [step.text for step in found if step.kind == "command"]
    lines = [line.removeprefix("pip install ") for line in commands if line.startswith("pip install ")]
    return lines, [step.text for step in found if step.kind == "python"]


def pythons() -> list[str]:
    """The Pythons of this machine that the wheel is for, one of each version."""
    found = []
    for version in VERSIONS:
        own = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
        path = own[-1] if own else shutil.which(f"python{version}")
        if path is not None:
            found.append(path)
    return found


def clean() -> dict[str, str]:
    """The environment variables of somebody who has never had Kindler."""
    dropped = ("PYTHON", "KINDLER", "SPARK", "PYSPARK", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def run(*words: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env or clean(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def built(folder: Path) -> list[Path]:
    """The wheels of the three distributions, each built from its source distribution."""
    run(sys.executable, "-m", "venv", folder / "hatch", cwd=folder)
    run(folder / "hatch/bin/pip", "install", "--quiet", "hatchling", cwd=folder)
    for source in DISTRIBUTIONS.values():
        run(
            folder / "hatch/bin/python",
            "-m",
            "hatchling",
            "build",
            "--target",
            "sdist",
            "--directory",
            folder,
            cwd=source,
        )
    for name in DISTRIBUTIONS:
        archive = next(folder.glob(f"{name}-*.tar.gz"))
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            folder,
            archive,
            cwd=folder,
        )
    return [next(folder.glob(f"{name}-*.whl")) for name in DISTRIBUTIONS]


def smoke(python: str, wheel: Path, tfrecord: Path, compat: Path, folder: Path) -> None:
    """Install the wheels with what they need and nothing else, and try them."""
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    own = folder / "venv" / "bin"
    run(own / "pip", "install", "--quiet", tfrecord, wheel, cwd=folder)
    sys.stdout.write(run(own / "python", "-c", CORE, cwd=folder))
    assert run(own / "kindler", "--help", cwd=folder) == run(
        own / "python", "-m", "kindler", "--help", cwd=folder
    )
    run(own / "kindler", "info", cwd=folder)
    run(own / "kindler", "doctor", cwd=folder)
    run(own / "pip", "install", "--quiet", compat, cwd=folder)
    run(own / "python", "-c", COMPAT, cwd=folder)


def follow(wheels: Path, folder: Path, python: str = sys.executable) -> None:
    """Do what the README says in an empty environment and folder.

    Raises:
        SystemExit: A step fails, or prints something else than the README shows.
    """
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    home = folder / "home"
    work = folder / "work"
    home.mkdir()
    work.mkdir()
    links = f"{clean().get('PIP_FIND_LINKS', '')} {wheels}".strip()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**clean(), "PATH": path, "PIP_FIND_LINKS": links, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    torch = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    run("pip", "install", "--quiet", torch, cwd=work, env=environment)
    port = _free_port()
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for step in steps((ROOT / "README.md").read_text()):
            began = time.monotonic()
            printed = _do(step, work, environment, home, port, servers)
            title = step.text.strip().splitlines()[0]
            sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {title}\n")
            sys.stdout.flush()
            _compare(step, printed)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def _do(
    step: Step, work: Path, env: dict[str, str], home: Path, port: int, servers: list[subprocess.Popen[bytes]]
) -> str:
    """Do a step; what it prints on standard output."""
    if step.text.startswith("pip install "):
        return run(*shlex.split(step.text, comments=True), "--quiet", cwd=work, env=env)
    env = {**env, "HOME": str(home)}  # pip alone may use what it has downloaded before
    if step.kind == "python":
        (work / "program.py").write_text(step.text)
        return run("python", "program.py", cwd=work, env=env)
    command = step.text.replace("8000", str(port))  # another program may listen there
    if command.endswith("&"):
        words = shlex.split(command.removesuffix("&"))
        servers.append(subprocess.Popen(words, cwd=work, env=env, start_new_session=True))
        _wait_for(port, servers[-1])
        return ""
    return run("bash", "-c", command, cwd=work, env=env)


def _compare(step: Step, printed: str) -> None:
    shown, was = (_LAST_DIGITS.sub("", text).strip() for text in (step.shown, printed))
    if shown and not doctest.OutputChecker().check_output(shown, was, doctest.ELLIPSIS):
        raise SystemExit(f"{step.text}\nshould print\n{step.shown}\nbut prints\n{printed}")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("the server of the README does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--readme", action="store_true", help="do what the README says, in an empty environment"
    )
    parser.add_argument("pythons", nargs="*", help="paths of Pythons")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kindler-wheels-") as folder:
        (wheels := Path(folder, "wheels")).mkdir()
        found = built(wheels)
        for number, python in enumerate(chosen.pythons or ([sys.executable] if chosen.readme else pythons())):
            place = Path(folder, str(number))
            place.mkdir()
            if chosen.readme:
                follow(wheels, place, python)
            else:
                smoke(python, *found, place)
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for wheel in found:
            shutil.copy(wheel, target)


if __name__ == "__main__":
    main()
