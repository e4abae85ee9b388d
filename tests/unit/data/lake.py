"""Tables of tests: written by deltalake and pyiceberg, and with what these cannot write, by hand."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet, tables

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The address of an S3 server in another process: deltalake waits for it with the global lock held."""
    program = (
        "import sys; from moto.server import ThreadedMotoServer as Server;"
        "server = Server(ip_address='127.0.0.1', port=0, verbose=False); server.start();"
        "print('http://%s:%s' % server.get_host_and_port(), flush=True); sys.stdin.read(); server.stop()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdin is not None and server.stdout is not None  # noqa: PT018
        address = server.stdout.readline().strip()
        request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        yield address
        server.stdin.close()


def rows(table: Any, *names: str) -> list[Any]:
    """The rows as workers read them; of one column its values."""
    files = tables.inspect(table)
    read = parquet.scan(files, names or files.schemas[0].names, 0, files.rows)
    found = [row for batch in read for row in batch.to_pylist()]
    return [row[names[0]] for row in found] if len(names) == 1 else found


def same(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are the same rows, in any order."""
    return sorted(map(repr, rows)) == sorted(map(repr, others))


def commit(log: Path, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def additions(log: Path, version: int) -> list[dict[str, Any]]:
    lines = (log / f"{version:020}.json").read_text().splitlines()
    return [action["add"] for action in map(json.loads, lines) if "add" in action]


def with_deletion_vector(add: Mapping[str, Any], positions: Sequence[int]) -> list[Mapping[str, Any]]:
    """The actions that delete these rows of a file, as the protocol of Delta describes them."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(positions) - 1, 16)
    bitmap += struct.pack(f"<{len(positions)}H", *positions)
    data = struct.pack("<IqI", 1681511377, 1, 0) + bitmap
    text = base64.b85encode(data + b"\0" * (-len(data) % 4)).decode().translate(str.maketrans(_B85, _Z85))
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data)}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    return [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": {**vector, "cardinality": len(positions)}}},
    ]


def with_position_deletes(table: Any, file: str, positions: Sequence[int]) -> None:
    """Deletes rows of one file of an unpartitioned Iceberg table, which pyiceberg can only read."""
    from pyiceberg.manifest import (
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
    )
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles
    from pyiceberg.typedef import Record

    place = f"{table.location()}/data/{uuid.uuid4().hex}-deletes.parquet"
    with table.io.new_output(place).create() as sink:
        pq.write_table(
            pa.table({"file_path": [file] * len(positions), "pos": pa.array(positions, pa.int64())}), sink
        )
    removal = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=place,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(positions),
        file_size_in_bytes=len(table.io.new_input(place)),
    )
    removal.spec_id = 0

    class Writer(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

    class Deletion(_FastAppendFiles):
        def _manifests(self) -> list[Any]:
            output = table.io.new_output(f"{table.location()}/metadata/{uuid.uuid4().hex}-m0.avro")
            writer = Writer(table.spec(), table.schema(), output, self._snapshot_id, "deflate")
            with writer:
                entry = ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=removal
                )
                writer.add_entry(entry)
            return [writer.to_manifest_file(), *self._existing_manifests()]

    with table.transaction() as transaction:
        Deletion(operation=Operation.DELETE, transaction=transaction, io=table.io).commit()
