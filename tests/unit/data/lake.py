"""Tables of tests: written by deltalake and pyiceberg, and with what these cannot write, by hand."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import shutil
import socket
import struct
import subprocess
import sys
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kindler
from kindler.data import parquet, tables

_AZURE = {  # the emulator's own, which are published
    "azure_storage_account_name": "devstoreaccount1",
    "azure_storage_account_key": (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
}
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


@contextlib.contextmanager
def azure_server(container: str) -> Iterator[dict[str, str]]:
    """Options for deltalake of Azurite, Microsoft's emulator (npm install azurite)."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH (npm install azurite)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = [program, "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            next(line for line in server.stdout if "successfully listens" in line)
            place = f"{_AZURE['azure_storage_account_name']}/{container}"
            when = formatdate(usegmt=True)
            headers = {"x-ms-date": when, "x-ms-version": "2021-08-06"}
            lines = [f"{name}:{value}" for name, value in headers.items()]
            account = _AZURE["azure_storage_account_name"]
            signed = "\n".join(["PUT", *[""] * 11, *lines, f"/{account}/{place}", "restype:container"])
            key = base64.b64decode(_AZURE["azure_storage_account_key"])
            mark = base64.b64encode(hmac.digest(key, signed.encode(), "sha256")).decode()
            headers["Authorization"] = f"SharedKey {account}:{mark}"
            address = f"http://127.0.0.1:{port}"
            request = urllib.request.Request(
                f"{address}/{place}?restype=container", method="PUT", headers=headers
            )
            urllib.request.urlopen(request, timeout=60).close()
            yield {**_AZURE, "azure_storage_endpoint": f"{address}/{account}", "azure_allow_http": "true"}
        finally:
            server.kill()


def uploaded(folder: Path, bucket: str, address: str) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        place = urllib.parse.quote(f"{bucket}/{path.relative_to(folder)}")
        request = urllib.request.Request(f"{address}/{place}", data=path.read_bytes(), method="PUT")
        request.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(request, timeout=60).close()


def rows(table: Any, *names: str) -> list[Any]:
    """The rows as workers read them; of one column its values."""
    files = tables.inspect(table)
    read = parquet.scan(files, names or files.schemas[0].names, 0, files.rows)
    found = [row for batch in read for row in batch.to_pylist()]
    return [row[names[0]] for row in found] if len(names) == 1 else found


def collected(table: Any) -> list[str]:
    """The rows as a user gets them, as `shown`."""
    shards = kindler.read_parquet(table, engine="local")
    frames = [pa.Table.from_pandas(frame, preserve_index=False) for frame in shards.collect()]
    return shown([row for frame in frames for row in frame.to_pylist()])


def shown(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Rows as sorted JSON, without nulls."""
    present = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in present)


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
