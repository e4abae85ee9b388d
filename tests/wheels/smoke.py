"""Build the wheels and try them, for each Python, in an environment that does not know of the repository.

`python tests/wheels/smoke.py [--example] [PYTHON...]` (or `make wheels`). Without arguments it takes every
Python from 3.10 to 3.13 that is on PATH or of pyenv. Each installs the wheel with its smallest set of
packages, moves some data, and runs the command. `--example` installs what the README's pip line says instead,
and runs the README's first example.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
CORE = """
import kindler, numpy as np, os, sys
assert "site-packages" in kindler.__file__, kindler.__file__
assert os.path.exists(os.path.join(os.path.dirname(kindler.__file__), "py.typed"))
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
import kindler.compat.zoo.orca
from kindler import Estimator
from kindler.frameworks.registry import FRAMEWORKS
assert {"tf_graph", "mxnet"} <= set(FRAMEWORKS.names)
assert Estimator.from_graph.__doc__ and FRAMEWORKS.spec("tf_graph").gpus
"""


def pythons() -> list[str]:
    """The Pythons of this machine that the wheel is for, one of each version."""
    found = []
    for version in VERSIONS:
        own = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
        path = own[-1] if own else shutil.which(f"python{version}")
        if path is not None:
            found.append(path)
    return found


def built(folder: Path) -> list[Path]:
    """The wheels of kindler, kindler-tfrecord and kindler-compat, built from what is in the repository."""
    for source in (ROOT, ROOT / "packages/kindler-tfrecord", ROOT / "packages/kindler-compat"):
        words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
        run(sys.executable, *words, cwd=folder)
    return [next(folder.glob(f"{name}-*.whl")) for name in ("kindler", "kindler_tfrecord", "kindler_compat")]


def readme() -> tuple[str, str]:
    """The pip line and the first example."""
    text = (ROOT / "README.md").read_text()
    line = re.search(r"^\$ pip install (.+)$", text, re.MULTILINE)
    example = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert line is not None
    assert example is not None
    return line[1].partition("#")[0].strip(), example[1]


def run(*words: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KINDLER"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def smoke(python: str, wheel: Path, tfrecord: Path, compat: Path, folder: Path, *, example: bool) -> None:
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    own = folder / "venv" / "bin"
    asked = [str(wheel)]
    line, program = readme()
    if example:
        asked = re.sub(r"'?kindler(\[[^\]]*\])'?", lambda found: f"{wheel}{found[1]}", line).split()
    run(own / "pip", "install", "--quiet", tfrecord, *asked, cwd=folder)
    if not example:
        sys.stdout.write(run(own / "python", "-c", CORE, cwd=folder))
        run(own / "pip", "install", "--quiet", compat, cwd=folder)
        run(own / "python", "-c", COMPAT, cwd=folder)
    (folder / "example.py").write_text(program)
    if example:
        sys.stdout.write(run(own / "python", "example.py", cwd=folder))
    run(own / "kindler", "info", cwd=folder)
    run(own / "kindler", "doctor", cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", action="store_true", help="run the README's first example, too")
    parser.add_argument("pythons", nargs="*", help="paths of Pythons")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kindler-wheels-") as folder:
        wheels = built(Path(folder))
        for number, python in enumerate(chosen.pythons or pythons()):
            place = Path(folder, str(number))
            place.mkdir()
            smoke(python, *wheels, place, example=chosen.example)
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for wheel in wheels:
            shutil.copy(wheel, target)


if __name__ == "__main__":
    main()
