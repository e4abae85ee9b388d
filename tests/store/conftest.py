"""Stores to test on: SQLite and files, PostgreSQL and files, SQLite and an S3 server. All are real ones."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from kindler import Store

PLACES = ("sqlite", "postgres", "s3")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own, without a database."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or list(
        filter(None, [Path(found) if (found := shutil.which("initdb")) else None])
    )
    if not programs:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="kindler-postgres-"))
    # It refuses to run as root.
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres", "postgres")
    control = [*user, str(programs[-1].with_name("pg_ctl")), "-D", f"{folder}/data"]

    def call(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = f"-p {port} -h 127.0.0.1 -k {folder} -F -c max_connections=200"
    try:
        call(*user, str(programs[-1]), "-D", f"{folder}/data", "-U", "kindler", "-A", "trust", "--no-sync")
        call(*control, "-o", settings, "-l", f"{folder}/log", "-w", "start")
        yield f"postgresql://kindler@127.0.0.1:{port}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], cwd="/", capture_output=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server with the bucket "store"."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    request = urllib.request.Request(f"http://{host}:{port}/store", method="PUT")
    urllib.request.urlopen(request).close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new store is to be."""
    if request.param == "sqlite":
        return str(tmp_path / "store")
    if request.param == "postgres":
        import psycopg

        server = request.getfixturevalue("postgres")
        name = f"k{uuid.uuid4().hex}"
        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"{server}/{name}?blobs=file://{tmp_path}"
    told = f"endpoint={request.getfixturevalue('s3')}&access_key_id=a&secret_access_key=b&region=us-east-1"
    return f"sqlite:///{tmp_path}/catalog.db?blobs=" + quote(f"s3://store/{uuid.uuid4().hex}?{told}", safe="")


@pytest.fixture
def om(url: str) -> Iterator[Store]:
    """All shelves of a new store, on each kind of place."""
    opened = Store(url)
    yield opened
    opened.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Store]:
    """All shelves of a new store in a folder, for what does not depend on the place."""
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()
