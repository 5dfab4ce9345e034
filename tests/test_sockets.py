"""Names with several addresses: those that this machine has are served."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from shmserve.config import HttpConfig
from shmserve.sockets import ListenError, open_listeners

ELSEWHERE = (socket.AF_INET, "192.0.2.1")  # of a net for documentation: nobody has it
NO_FAMILY = (socket.AF_INET6, "::1")
HERE = (socket.AF_INET, "127.0.0.1")


@pytest.fixture
def name_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """name_of(addresses...): any name leads to these."""

    def lead(*addresses: tuple[int, str]) -> None:
        def found(host: Any, port: int, **_: Any) -> list[Any]:
            return [(family, 1, 6, "", (address, port)) for family, address in addresses]

        def make(family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> Any:
            if family == socket.AF_INET6:  # a kernel without it
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            return real(family, kind)

        real = socket.socket
        monkeypatch.setattr(socket, "getaddrinfo", found)
        monkeypatch.setattr(socket, "socket", make)

    return lead


@pytest.mark.parametrize("num_http", [1, 2])
@pytest.mark.parametrize("other", [ELSEWHERE, NO_FAMILY])
def test_addresses_that_are_not_there_do_not_keep_us_from_the_others(
    name_of: Any, other: tuple[int, str], num_http: int
) -> None:
    """localhost leads to ::1, too, in a container that has no IPv6."""
    name_of(other, HERE)
    listeners = open_listeners(HttpConfig(host="localhost", port=0), num_http, {})
    assert [[sock.getsockname()[0] for sock in group] for group in listeners.groups] == (
        [["127.0.0.1"]] * num_http
    )
    assert listeners.url == f"http://localhost:{listeners.port}"
    listeners.close()


@pytest.mark.parametrize("num_http", [1, 2])
@pytest.mark.parametrize("only", [ELSEWHERE, NO_FAMILY])
def test_a_name_without_any_address_of_ours_is_refused_by_it(
    name_of: Any, only: tuple[int, str], num_http: int
) -> None:
    name_of(only, only)
    with pytest.raises(ListenError, match="is no address of this machine"):
        open_listeners(HttpConfig(host="elsewhere", port=0), num_http, {})


def test_an_address_that_is_taken_is_refused_whatever_the_others(name_of: Any) -> None:
    with socket.socket() as taken:
        taken.bind((HERE[1], 0))
        taken.listen()
        name_of((socket.AF_INET, "127.0.0.2"), HERE)
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port} is in use"):
            open_listeners(HttpConfig(host="localhost", port=port), 1, {})


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "\u00fc" * 64, ".x"])
def test_what_no_name_can_be_is_refused_by_the_flag(host: str) -> None:
    with pytest.raises(ListenError, match=r"--host .* is no address of this machine: "):
        open_listeners(HttpConfig(host=host, port=0), 1, {})
