"""The listening sockets: bound by the supervisor before anything is loaded, and passed on to every front end it starts.

Owns: the probe, the binding, the file of a Unix socket, the sockets that systemd hands over, the limit on descriptors. Never: accepts a connection.
They stay open in the supervisor for its whole life: while a front end restarts, connections wait in the backlog.

A port is probed without SO_REUSEPORT first, so one in use is found at once, with one front end or many; SO_REUSEADDR lets a
restart bind at once in spite of connections in TIME_WAIT.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from shmserve.config import HttpConfig
from shmserve.tls import server_context

_FIRST_PASSED_FD = 3  # SD_LISTEN_FDS_START


class ListenError(RuntimeError):
    """The address cannot be served; the text is one line that names it."""


class _NoSuchAddressError(ListenError):
    """This machine does not have it: where a name has several (localhost in a container without IPv6), the others will do."""


@dataclass(slots=True)
class Listeners:
    """`groups[i]` are the sockets of front end i; `url` is where a client finds them; `port` is 0 for a Unix socket."""

    groups: list[list[socket.socket]]
    url: str
    port: int
    uds: str = ""
    _uds_inode: int = field(default=0)

    def close(self) -> None:
        """Close every socket, and remove the Unix socket's file if it is still ours."""
        for sock in {id(sock): sock for group in self.groups for sock in group}.values():
            sock.close()
        if self.uds:
            try:
                if os.stat(self.uds).st_ino == self._uds_inode:
                    os.unlink(self.uds)
            except FileNotFoundError:
                return  # somebody tidied up before us


def open_listeners(
    config: HttpConfig, num_http: int, environ: MutableMapping[str, str]
) -> Listeners:
    """The sockets of `num_http` front ends, listening. Raises ListenError, and ConfigError for TLS files that are none, within a
    moment, before anything else is made.
    """
    scheme = "http" if server_context(config) is None else "https"
    passed = _passed_sockets(environ)
    if passed:
        return _from_passed(passed, num_http, scheme)
    if config.uds:
        return _open_unix(config, num_http)
    return _open_tcp(config, num_http, scheme)


def _open_tcp(config: HttpConfig, num_http: int, scheme: str) -> Listeners:
    try:
        found = socket.getaddrinfo(
            config.host or None,
            config.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV,
        )
    except (socket.gaierror, UnicodeError) as error:  # the latter of what no name can be
        reason = getattr(error, "strerror", None) or str(error)
        raise ListenError(
            f"--host {config.host!r} is no address of this machine: {reason}"
        ) from None
    addresses = list(dict.fromkeys((family, address[:2]) for family, _, _, _, address in found))
    groups: list[list[socket.socket]] = [[] for _ in range(num_http)]
    port = config.port
    missing: _NoSuchAddressError | None = None
    try:
        for family, (host, _) in addresses:
            try:
                probe = _bind(family, str(host), port, config.backlog if num_http == 1 else None)
            except _NoSuchAddressError as error:
                missing = error
                continue
            port = probe.getsockname()[1]  # port 0: the other addresses take the same one
            if num_http == 1:
                groups[0].append(probe)
                continue
            probe.close()
            for group in groups:
                group.append(_bind(family, str(host), port, config.backlog, reuse_port=True))
        if missing is not None and not groups[0]:
            raise missing
    except BaseException:
        for group in groups:
            for sock in group:
                sock.close()
        raise
    shown = config.host or "127.0.0.1"
    return Listeners(groups, f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}", port)


def _bind(
    family: int, host: str, port: int, backlog: int | None, reuse_port: bool = False
) -> socket.socket:
    """A bound socket, listening unless `backlog` is None. Raises ListenError."""
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _why(host, port, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        if backlog is not None:
            sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _why(host, port, error) from None
    return sock


def _why(host: str, port: int, error: OSError) -> ListenError:
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ListenError(
            f"{where} is in use by another program; stop it or choose another --port"
        )
    if error.errno == errno.EACCES:
        return ListenError(
            f"{where} needs a privilege that this user lacks; choose a --port from 1024 up"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return _NoSuchAddressError(f"{where} is no address of this machine; choose another --host")
    return ListenError(f"cannot listen on {where}: {error.strerror}")


def _open_unix(config: HttpConfig, num_http: int) -> Listeners:
    """One socket for all front ends: SO_REUSEPORT does not spread Unix sockets, a shared accept queue does."""
    path = os.path.abspath(config.uds)
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(config.backlog)
        sock.setblocking(False)
        inode = os.stat(path).st_ino
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    return Listeners([[sock] for _ in range(num_http)], f"unix:{path}", 0, path, inode)


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody answers on. Raises ListenError if somebody does, or if it is no socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"cannot look at --uds {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"--uds {path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise ListenError(f"--uds {path} cannot be probed: {error.strerror or error}") from None
    raise ListenError(f"--uds {path} is in use by another program; stop it or choose another path")


def _passed_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The stream sockets that systemd's socket activation hands to this very process. Forgets the variables."""
    pid, count = environ.get("LISTEN_PID", ""), environ.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(key, None)
    sockets = []
    for fd in range(_FIRST_PASSED_FD, _FIRST_PASSED_FD + int(count)):
        try:
            os.set_inheritable(fd, False)
            sock = socket.socket(fileno=fd)
        except OSError as error:
            raise ListenError(
                f"descriptor {fd} from LISTEN_FDS is no socket: {error.strerror}"
            ) from None
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise ListenError(
                f"socket {fd} from LISTEN_FDS does not listen; use ListenStream= in the socket unit"
            )
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def _from_passed(sockets: list[socket.socket], num_http: int, scheme: str) -> Listeners:
    first = sockets[0]
    if first.family == socket.AF_UNIX:
        url, port = f"unix:{first.getsockname()}", 0
    else:
        host, port = first.getsockname()[:2]
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return Listeners([list(sockets) for _ in range(num_http)], url, port)


def raise_descriptor_limit() -> None:
    """A connection is a descriptor: the soft limit of 1,024 is for select(), which nobody here uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
