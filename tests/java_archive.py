"""Spark's classes as Java loads them fastest: an archive of its memory, made once for a checkout.

    python -m tests.java_archive     # writes build/java/options and the archive that it names

Every Java of the tests would otherwise find, read and parse the same ten thousand classes, a third of what a
session of a few jobs costs. `tests/java_options.py` adds the options. A Java or a Spark that the archive was
not made for goes without it, and says nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["OPTIONS"]

FOLDER = Path(__file__).parents[1] / "build" / "java"
OPTIONS = FOLDER / "options"


def make() -> None:
    """Make the archive; a Java that cannot leaves the tests without one, and that is said."""
    from kindler.spark.java import find_java

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    OPTIONS.write_text("")
    java = str(find_java().home / "bin" / "java")
    base, made = FOLDER / "base.jsa", FOLDER / "spark.jsa"
    if not _runs(java, "-Xshare:on", "-version"):  # it came without an archive of its own classes to build on
        _runs(java, "-Xshare:dump", f"-XX:SharedArchiveFile={base}", "-XX:+UseSerialGC")
    options = [
        f"-XX:ArchiveClassesAtExit={made}",
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-Xlog:disable",
    ]
    options += [f"-XX:SharedArchiveFile={base}"] if base.exists() else []
    if not _runs(sys.executable, "-m", __spec__.name, "train", SPARK_SUBMIT_OPTS=" ".join(options)):
        made.unlink(missing_ok=True)
    if not made.exists():
        sys.stderr.write("Java made no archive of Spark's classes: the tests do without.\n")
        return
    names = os.pathsep.join(str(archive) for archive in (base, made) if archive.exists())
    OPTIONS.write_text(f"-XX:SharedArchiveFile={names} -Xlog:disable\n")


def _runs(*command: str, **environ: str) -> bool:
    done = subprocess.run(
        command, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, timeout=1200, check=False
    )
    return done.returncode == 0


def train() -> None:
    """What tests do with Spark, so that its classes are loaded."""
    import kindler

    spark: Any = kindler.init(cores=2, conf={"spark.sql.shuffle.partitions": "2"})
    frame = spark.createDataFrame([(i, float(i), str(i)) for i in range(10)], "i long, x double, s string")
    frame = frame.mapInArrow(_same, frame.schema)
    frame.write.parquet(str(FOLDER / "rows"))
    read = spark.read.parquet(str(FOLDER / "rows"))
    read.groupBy("s").count().orderBy("s").collect()
    read.select("i", "s").join(read.select("i", "x"), "i").selectExpr("array(x, x) as v", "s").toPandas()
    spark.sparkContext.parallelize(range(4), 2).barrier().mapPartitions(list).collect()
    # As `kindler.stop` does, but Java gets the time to write.
    process = spark.sparkContext._gateway.proc
    spark.stop()
    process.stdin.close()
    process.wait(300)


def _same(batches: Any) -> Any:
    yield from batches


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else make()
