"""Connections to the catalog's database, with what each database needs to be safe among many processes."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import NullPool, StaticPool

from kindler.errors import StoreError
from kindler.registry import imported
from kindler.store.files import disk_errors

_PATIENCE_S = 60.0


class Database:
    """Transactions on one database, from any thread, also after a fork.

    Attributes:
        path: The file of SQLite's; None in memory, and for PostgreSQL.
        dialect: Either "sqlite" or "postgresql".
    """

    def __init__(self, url: str) -> None:
        path = url.removeprefix("sqlite:///")
        # A path is taken as it is: in a URL, percent signs in it would mean something else.
        self._url = sa.make_url(url) if path == url else sa.URL.create("sqlite", database=path)
        self.path = None if path == url else Path(path)
        self._pid = os.getpid()
        self._engine = _engine(self._url, self.path)
        self.dialect = self._engine.dialect.name
        is_sqlite = self.dialect == "sqlite"
        # All threads share the one connection to a database in memory, one at a time.
        in_memory = is_sqlite and self.path is None
        self._alone: Any = threading.RLock() if in_memory else nullcontext()
        # Versions never change, so reading needs no transaction: PostgreSQL is spared two messages of three,
        # and for SQLite none is begun.
        alone = {} if is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._reader = self._engine.execution_options(**alone)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """A connection that only reads."""
        return self._transaction(self._reader)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that may write; undone if the block raises."""
        with self._transaction(self._engine) as connection:
            if self.dialect == "sqlite":
                # One that reads first and writes later would fail where another has written in between.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def rows(self, query: sa.Select[Any]) -> Sequence[Any]:
        with self.reading() as connection:
            return connection.execute(query).all()

    def values(self, query: sa.Select[Any]) -> list[Any]:
        """The first column of the rows."""
        return [row[0] for row in self.rows(query)]

    def compiled(self, statement: sa.Select[Any]) -> Callable[[sa.Connection, dict[str, Any]], Any]:
        """A function that executes the statement, without the time that SQLAlchemy takes to know it again."""
        compiled: Any = statement.compile(self._engine)

        def execute(connection: sa.Connection, values: dict[str, Any]) -> Any:
            params = compiled.construct_params(values)
            return connection.exec_driver_sql(
                compiled.string,
                tuple(params[name] for name in compiled.positiontup) if compiled.positional else params,
            )

        return execute

    @property
    def is_read_only(self) -> bool:
        """Whether it is a file that this user may not write to."""
        return self.path is not None and _is_read_only(self.path)

    def copied(self) -> Database:
        """The rows of a file as they are now, in memory."""
        assert self.path is not None
        copy = Database("sqlite://")
        with copy._translated(), closing(_connect_to_read(self.path)) as source:
            borrowed = copy._engine.raw_connection()
            source.backup(borrowed.driver_connection)  # type: ignore[arg-type]
            borrowed.close()
        return copy

    def compact(self) -> tuple[int, int]:
        """Give back the room that removed rows took.

        Returns:
            The bytes before and after; 0 where the database does not say.
        """
        before = self._file_bytes()
        statements = ["VACUUM ANALYZE"]
        if self.dialect == "sqlite":
            statements = ["VACUUM", "ANALYZE", "PRAGMA wal_checkpoint(TRUNCATE)"]
        with self._alone, self._translated(), self._reader.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        return before, self._file_bytes()

    def _file_bytes(self) -> int:
        if self.path is None:
            return 0
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        if self._pid != os.getpid():
            self._engine.dispose(close=False)  # the parent still talks on them
            self._pid = os.getpid()
        with self._alone, self._translated(), engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as exc:
            if self.path is not None:
                # Where a file could not be opened to write, SQLite has opened it to read, for good.
                self._engine.dispose()
            shown = self._url.render_as_string(hide_password=True)
            raise StoreError(f"the catalog at {shown} failed: {getattr(exc, 'orig', None) or exc}") from exc


def _engine(url: sa.URL, path: Path | None) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        imported("psycopg", what="a store in PostgreSQL", package="psycopg", extra="postgres")
        return sa.create_engine(url, pool_pre_ping=True, pool_recycle=1800)
    settings: dict[str, Any] = {"timeout": _PATIENCE_S, "check_same_thread": False}
    if path is None:
        engine = sa.create_engine(url, connect_args=settings, poolclass=StaticPool)
    elif _is_read_only(path):
        # Each time anew, as it may have to be opened in another way.
        return sa.create_engine(url, creator=lambda: _connect_to_read(path), poolclass=NullPool)
    else:
        with disk_errors(path.parent), suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o666, exist_ok=False)  # as the umask says: SQLite would let no group write
        engine = sa.create_engine(url, connect_args=settings)
    event.listen(engine, "connect", _prepare)
    return engine


def _is_read_only(path: Path) -> bool:
    """Whether there is a database that this user may not write to."""
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def _connect_to_read(path: Path) -> sqlite3.Connection:
    # As long as somebody has it open to write, a file beside it says what is new. Where there is none,
    # nothing changes, and SQLite must be told so: it would want to make that file.
    is_open = path.with_name(path.name + "-wal").exists()
    uri = f"{path.as_uri()}?mode=ro" + ("" if is_open else "&immutable=1")
    return sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S, check_same_thread=False, isolation_level=None)


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # `writing` says when a transaction begins, and of which kind
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as exc:
            # Of several that create the file at once, SQLite lets one wait for the other only later.
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
