"""SIGTERM is told while a block runs; a notice is seen in a file or in what a metadata service answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from kindler import RunSettings
from kindler.engine.notices import NoticeSource, on_sigterm, sigterm_interrupts, telling
from kindler.errors import ConfigError


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The SIGTERMs that the handler of this process's user got."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_signal_calls_the_block_and_the_users_handler_is_back_after_it(received: list[int]) -> None:
    users, calls = signal.getsignal(signal.SIGTERM), list[bool]()
    with on_sigterm(lambda: calls.append(True)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    assert (calls, received) == ([True, True], [])
    assert signal.getsignal(signal.SIGTERM) is users


def test_a_fork_of_the_process_does_what_it_would_have_done(received: list[int]) -> None:
    with on_sigterm(lambda: os._exit(3)):
        pid = os.fork()
        if not pid:
            signal.raise_signal(signal.SIGTERM)
            os._exit(len(received))

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_nothing_changes_on_another_thread_or_where_the_signal_is_ignored(received: list[int]) -> None:
    seen: list[object] = []

    def look() -> None:
        with on_sigterm(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert seen == [signal.getsignal(signal.SIGTERM)]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    look()
    assert seen[1] is signal.SIG_IGN


def test_a_signal_interrupts_the_block_and_is_handled_after_it(received: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_signal_is_told_on_a_thread_that_ends_with_the_block(received: list[int]) -> None:
    told = threading.Event()
    with telling(told.set):
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(60)
        threads = [thread for thread in threading.enumerate() if thread.name == "kindler-sigterm"]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path) -> None:
    source = NoticeSource(str(tmp_path / "notice"))
    assert not source.has_notice()
    (tmp_path / "notice").touch()
    assert source.has_notice()


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of three clouds, one path each."""

    answers: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        answer = self.answers.get(self.path)
        if self.path == "/aws" and self.headers["X-aws-ec2-metadata-token"] != "a token":
            self._answer(401, "")
        elif self.path == "/google" and self.headers["Metadata-Flavor"] != "Google":
            self._answer(403, "")
        elif self.path == "/azure" and self.headers["Metadata"] != "true":
            self._answer(400, "")
        else:
            self._answer(404 if answer is None else 200, answer or "")

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self._answer(200, "a token")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.answers = {"/google": "FALSE", "/azure": '{"Events": [{"EventType": "Freeze"}]}'}
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("cloud", "notice"),
    [
        ("aws", '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'),
        ("google", "TRUE"),
        ("azure", '{"Events": [{"EventType": "Preempt"}]}'),
    ],
)
def test_a_clouds_answer_is_a_notice_once_the_machine_is_to_go(
    metadata: str, cloud: str, notice: str
) -> None:
    source = NoticeSource(f"{metadata}/{cloud}")
    assert not source.has_notice()
    Metadata.answers[f"/{cloud}"] = notice
    assert source.has_notice()


def test_a_service_that_cannot_be_reached_is_no_notice_but_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        NoticeSource("http://127.0.0.1:9/notice").has_notice()


def test_a_notice_is_a_path_or_a_url_and_takes_some_time() -> None:
    with pytest.raises(ConfigError, match=r"notice=3\): must be a path or a URL"):
        RunSettings(notice=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="notice_s must be more than 0"):
        RunSettings(notice_s=0)
