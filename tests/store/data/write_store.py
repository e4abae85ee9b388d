"""Writes `format2.zip`: a store as Kindler wrote it before its catalog had the format 3.

Run with the sources of commit f430f2d first on the path, and PostgreSQL installed:

    PYTHONPATH=OLD/src:OLD/packages/kindler-tfrecord/src:. python tests/store/data/write_store.py

The archive has the catalog as a SQLite file (`catalog.sqlite`) and as statements for PostgreSQL
(`postgres.sql`), the blobs of both, and `expected.json`: each version, the values of the datasets, tags,
splits, and the keys with their secrets.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kindler import Store
from kindler.store.keys import Keys

OUT = Path(__file__).with_name("format2.zip")


def fill(url: str) -> dict[str, Any]:
    """Put everything into a new store, and return what a reader must find."""
    om = Store(url)
    for function in (os.path.basename, os.path.dirname, os.path.splitext, os.path.split, os.path.normpath):
        om.models.put(function, "team/net", attributes={"of": function.__name__})
    om.models.tag("team/net@2", "prod")
    om.models.tag("team/net@4", "next")
    om.models.drop("team/net@3")
    om.models.split("team/net@prod", canary={4: 0.25}, shadow={1: 0.5, 5: 1.0})
    om["other"].models.put(os.path.join, "net", tag=["a", "b"])
    om.scripts.put(os.path.relpath, "job")
    for i in range(7):  # 3 and 1 go: their parts are handed on to 4 and 2
        om.datasets.put(np.array([i, 10 * i]), "grown", mode="append", attributes={"i": i})
    om.datasets.drop("grown@3")
    om.datasets.drop("grown@1")
    om.datasets.put(np.array([[1.5]]), "replaced")
    om.datasets.put(np.array([[2.5]]), "replaced", mode="append")
    om.datasets.put(np.array([3.5]), "replaced", mode="replace", tag="short")
    om.datasets.put(np.array([4.5, 5.5]), "replaced", mode="append")
    for rows in ([1, 2], [3], [1, 2]):
        om.datasets.put(pa.table({"a": rows, "b": [str(n) for n in rows]}), "table", mode="append")
    om.datasets.put((np.arange(3), np.ones((3, 2))), "pair")
    om.datasets.put((np.arange(2), np.zeros((2, 2))), "pair", mode="append")
    om.datasets.put({"rows": [1, 2], "text": "é"}, "value")
    om.datasets.put([1], "gone")
    om.datasets.drop("gone")
    keys = Keys(url)
    tokens = [keys.add(["admin"], note="all")[1], keys.add(["read"], days=1000, buckets=["other"])[1]]
    tokens.append(keys.add(["predict"], names={"models": ["team/**"]})[1])
    keys.remove(keys.add(["write"])[0].id)
    told = {
        "versions": versions(om),
        "values": {
            str(v): plain(om.datasets.get(str(v)))
            for name in om.datasets.list()
            for v in om.datasets.versions(name)
        },
        "tags": {bucket: om.store.all_tags(bucket, "models") for bucket in om.buckets},
        "keys": [[key.id, key.scopes, key.note, key.buckets, key.names] for key in keys.list()],
        "tokens": tokens,
        "splits": [
            [s.bucket, s.name, s.alias, list(s.canary.items()), list(s.shadow.items())]
            for s in om.models.splits("team/net").values()
        ],
    }
    keys.close()
    om.close()
    return told


def versions(om: Store) -> dict[str, Any]:
    """Every version, by bucket, shelf, name and number."""
    return {
        f"{v.bucket}/{v.shelf}/{v}": [
            v.kind,
            v.created.isoformat(),
            v.size,
            v.digest,
            [[file.path, file.sha256, file.size] for file in v.files],
            v.meta,
            v.attributes,
        ]
        for bucket in om.buckets
        for shelf in (om[bucket].models, om[bucket].datasets, om[bucket].scripts)
        for name in shelf.list(hidden=True)
        for v in shelf.versions(name)
    }


def plain(value: Any) -> Any:
    """A dataset as JSON has it."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if isinstance(value, pa.Table):
        return value.to_pydict()
    return value.tolist() if isinstance(value, np.ndarray) else value


def main() -> None:
    """Write the archive."""
    from tests.store.conftest import postgres

    server: Any = inspect.unwrap(postgres)()  # the fixture's function
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED) as archive:
        places = Path(folder)
        address = next(server)
        expected = {
            "sqlite": fill(str(places / "store")),
            "postgres": fill(f"{address}/postgres?blobs=file://{places}/blobs-of-postgres"),
        }
        program = max(map(str, Path("/usr/lib/postgresql").glob("*/bin/pg_dump")), default="pg_dump")
        dump = [program, "--inserts", "--no-owner", f"--dbname={address}/postgres"]
        text = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
        noise = ("--", "\\", "SET", "SELECT pg_catalog.set_config")
        wanted = [line for line in text.splitlines() if line and not line.startswith(noise)]
        server.close()
        archive.writestr("expected.json", json.dumps(expected, sort_keys=True))
        archive.writestr("postgres.sql", "\n".join(wanted) + "\n")
        archive.write(places / "store" / "catalog.sqlite", "catalog.sqlite")
        for source in ("store", "blobs-of-postgres"):
            for blob in sorted((places / source / "blobs").glob("??/*")):
                name = f"blobs/{blob.parent.name}/{blob.name}"
                if name not in archive.namelist():
                    archive.write(blob, name)


if __name__ == "__main__":
    main()
