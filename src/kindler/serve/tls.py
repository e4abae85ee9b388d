"""The certificate of a server, checked before it listens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from kindler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format.

    Attributes:
        certificate: The server's certificate, followed by those between it and its authority.
        key: Its private key, without a password.
        client_ca: Authorities, one of which must have signed the certificate of every client; None asks
            clients for none.

    Raises:
        ConfigError: A file is missing, or they do not belong together.
    """

    certificate: str
    key: str
    client_ca: str | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_none)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except (OSError, ssl.SSLError, ValueError) as exc:
            named = ", ".join(filter(None, (self.certificate, self.key, self.client_ca)))
            raise ConfigError(f"the certificate cannot be used ({named}): {exc}.") from exc


def _none() -> str:
    raise ValueError("the private key has a password; write it to a file without one")
