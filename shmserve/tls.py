"""The certificate and key that a server speaks TLS with.

Owns: the way from --ssl-* to an SSL context, and one line for whatever is wrong with the files. Used by the supervisor at start, to
check them before anything is loaded, and by each front end.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from shmserve.config import ConfigError, HttpConfig

HANDSHAKE_TIMEOUT_S: Final = 10.0


def server_context(config: HttpConfig) -> ssl.SSLContext | None:
    """None without --ssl-certfile. Raises ConfigError for files that cannot be used.

    TLS 1.2 at least. With --ssl-ca-certs a client must show a certificate of one of those authorities.
    """
    if not config.ssl_certfile:
        for flag, value in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-keyfile-password-file", config.ssl_keyfile_password_file),
            ("--ssl-ca-certs", config.ssl_ca_certs),
        ):
            if value:
                raise ConfigError(f"{flag} needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    password = _password(config.ssl_keyfile_password_file)
    key = config.ssl_keyfile or config.ssl_certfile
    try:
        # Without a password OpenSSL would ask on the terminal: the empty one fails at once.
        context.load_cert_chain(config.ssl_certfile, key, lambda: password)
    except (ssl.SSLError, OSError, ValueError) as error:
        hint = "" if password else "; an encrypted key needs --ssl-keyfile-password-file"
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in {key} cannot be used: {_why(error)}{hint}"
        ) from None
    if config.ssl_ca_certs:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {_why(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _password(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ssl-keyfile-password-file {path}: {_why(error)}") from None


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no usable PEM in it").lower().replace("_", " ")
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())
