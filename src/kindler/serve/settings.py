"""How a server behaves, and its certificate: frozen, and valid once built."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from kindler.engine.placement import half_of_memory, is_device
from kindler.errors import ConfigError

_LEVELS = ("debug", "info", "warning", "error")
_LEAST = {
    "refresh_s": 0,
    "task_result_s": 0,
    "drain_s": 0,
    "timeout_s": 1e-3,
    "load_s": 1e-3,
    "drift_rows": 0,
}
_LEAST |= {"drift_psi": 1e-3, "drift_ks": 1e-3, "drift_s": 0.1, "payload_s": 0.1, "payload_days": 1e-3}
EVERY_MODEL = "*"  # in settings by model: all others


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Limits of a server.

    Attributes:
        model: The model that `/invocations` uses, optionally with a version; None uses the store's only one.
        trusted: Load what could run untrusted code: pickles, Lambda layers, scripts.
        batch_rows: Maximum rows in one model call. Larger requests are split, and their outputs joined.
        batches: Concurrent calls of one model, without isolation.
        alone: Names of models whose requests never share a call.
        queue_rows: Maximum rows queued for one model; beyond that, requests are rejected with 429.
        queue_bytes: The same in bytes. Also the maximum for the bodies of all requests together; beyond that,
            requests are rejected with 503.
        body_bytes: Maximum size of a request body; larger ones are rejected with 413.
        rows: Maximum rows in one request; more are rejected with 413.
        answers: Maximum answers that one text model generates at the same time.
        queue_answers: Maximum prompts that wait for one text model; beyond that, requests are rejected with
            429.
        answer_tokens: Maximum tokens that one request may ask a text model for, over all its answers.
        prompt_tokens: Maximum tokens of a prompt.
        answer_s: Seconds until an answer of a text model ends, whether it is streamed or not.
        timeout_s: Seconds until a request is answered with 504, or with 408 if it has not arrived by then.
        memory_bytes: Memory for all loaded models together; by default half of the machine's memory.
        refresh_s: Seconds between checks for moved tags and new versions.
        task_results: Maximum number of tasks to remember; the oldest finished one is forgotten first. While
            none has finished, new ones are rejected with 429.
        task_result_bytes: Memory for the results of finished tasks together; the oldest is forgotten first.
        task_result_s: Seconds that the result of a finished task is kept.
        drain_s: Seconds that running requests get when the server is stopped.
        access_log: File for a JSON line about each request; "-" is standard error, None no log.
        audit_log: The same for changes, and for requests whose key was rejected.
        log_level: The lowest level of lines in the access log: "info", "warning" (4xx) or "error" (5xx).
        cors_origins: Web origins whose pages may use the server; "*" is all.
        isolation: "process": models run in separate processes, sandboxed unless `trusted`. "none": in the
            server's process, where a model that crashes or exhausts the memory brings down the server.
        processes: Maximum processes of one model; None chooses by the cores and the kind of model.
        model_memory_bytes: Memory for one process of a model; by default as much as for all models together.
        load_s: Seconds that loading a model into a process may take.
        device: Where models run: "auto" uses a GPU if there is one and the model can use it; "cpu"; "cuda"
            and "cuda:1" require a GPU.
        devices: The same for individual models, by name.
        device_memory_bytes: Memory of each GPU for all loaded models; by default nine tenths.
        drift_rows: Rows of the last requests of a model that are compared with its training data; 0 turns
            that off.
        drift_psi: The population stability index above which a column is an alarm.
        drift_ks: The Kolmogorov-Smirnov distance above which a column of numbers is an alarm.
        drift_s: Seconds between comparisons for the metrics and the log.
        log_payloads: The share of requests whose rows are appended to a dataset of the store, by model; "*"
            is every other model, and "BUCKET:NAME" a model of another bucket. By default none.
        redact_columns: Names of inputs, columns and outputs that are never logged, by model as before. A
            model that lacks one of its names is not logged.
        payload_s: Seconds between writing payloads to the store: what a killed server loses.
        payload_bytes: Maximum payloads of a version in the store, uncompressed; the oldest rows are removed.
        payload_days: Days after which payloads are removed from the store.
    """

    model: str | None = None
    trusted: bool = False
    batch_rows: int = 64
    batches: int = 1
    alone: tuple[str, ...] = ()
    queue_rows: int = 16_384
    queue_bytes: int = 256 << 20
    body_bytes: int = 64 << 20
    rows: int = 100_000
    answers: int = 64
    queue_answers: int = 1024
    answer_tokens: int = 4096
    prompt_tokens: int = 131_072
    answer_s: float = 600.0
    timeout_s: float = 60.0
    memory_bytes: int = 0
    refresh_s: float = 0.5
    task_results: int = 1000
    task_result_bytes: int = 256 << 20
    task_result_s: float = 3600.0
    drain_s: float = 30.0
    access_log: str | None = None
    audit_log: str | None = None
    log_level: str = "info"
    cors_origins: tuple[str, ...] = ()
    isolation: str = "process"
    processes: int | None = None
    model_memory_bytes: int | None = None
    load_s: float = 300.0
    device: str = "auto"
    devices: Mapping[str, str] = field(default_factory=dict)
    device_memory_bytes: int | None = None
    drift_rows: int = 500
    drift_psi: float = 0.2
    drift_ks: float = 0.1
    drift_s: float = 10.0
    log_payloads: Mapping[str, float] = field(default_factory=dict)
    redact_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    payload_s: float = 30.0
    payload_bytes: int = 256 << 20
    payload_days: float = 30.0

    def __post_init__(self) -> None:
        if self.isolation not in ("process", "none"):
            raise ConfigError(f"ServeSettings(isolation={self.isolation!r}): must be 'process' or 'none'.")
        for name, device in {"": self.device, **self.devices}.items():
            if not is_device(device):
                shown = f" of {name!r}" if name else ""
                raise ConfigError(
                    f"device{shown} must be 'auto', 'cpu', 'cuda' or 'cuda:N'; received {device!r}."
                )
        if self.isolation == "none" and (self.devices or self.device != "auto"):
            raise ConfigError(
                "device: models of one process cannot be distinguished, so isolation='none' leaves the device"
                " to each framework.\nHint: isolation='process'; or CUDA_VISIBLE_DEVICES in the environment."
            )
        if not self.memory_bytes:
            object.__setattr__(self, "memory_bytes", half_of_memory())
        if self.log_level not in _LEVELS:
            raise ConfigError(f"log_level={self.log_level!r}: must be one of {', '.join(_LEVELS)}.")
        for name, share in self.log_payloads.items():
            if isinstance(share, bool) or not 0 <= share <= 1:
                shown = "" if name == EVERY_MODEL else f" of {name!r}"
                raise ConfigError(f"log_payloads{shown} must be from 0 to 1; received {share!r}.")
        if self.redact_columns and not self.log_payloads:
            raise ConfigError("redact_columns needs log_payloads: no payloads are logged.")
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least = _LEAST.get(one.name, 1)
            if not value >= least:
                raise ConfigError(f"ServeSettings({one.name}={value!r}): must be at least {least}.")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != "*" and (
                parts.scheme not in ("http", "https") or origin != f"{parts.scheme}://{parts.netloc or '?'}"
            ):
                raise ConfigError(
                    f"{origin!r} is not an origin.\nHint: use scheme://host[:port] without a path, or '*'."
                )


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate of a server, as files in PEM format.

    Attributes:
        certificate: The server's certificate, followed by any intermediate certificates.
        key: Its private key, without a password.
        client_ca: Authorities, one of which must have signed the certificate of each client; None requires no
            client certificates.

    Raises:
        ConfigError: A file is missing, or they do not belong together.
    """

    certificate: str
    key: str
    client_ca: str | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without this it would be asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=_reject_password)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except (OSError, ssl.SSLError, ValueError) as exc:
            named = ", ".join(filter(None, (self.certificate, self.key, self.client_ca)))
            raise ConfigError(f"the certificate cannot be used ({named}): {exc}.") from exc


def _reject_password() -> str:
    raise ValueError("the private key has a password; write it to a file without one")
