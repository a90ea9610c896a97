"""Ports that a server can use."""

import socket

import pytest

from areal_lite.system import network
from areal_lite.system.network import NODE, free_port, listen_address


def test_a_free_port_can_be_bound_and_is_none_of_an_outgoing_connection():
    port = free_port()
    assert 20000 <= port < 32768
    socket.create_server(("127.0.0.1", port)).close()


def test_taken_ports_are_skipped_until_none_is_left(monkeypatch):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(network, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"from {port} to {port} is free"):
            free_port()


def test_a_foreign_address_is_an_error():
    with pytest.raises(OSError):
        free_port("192.0.2.1")


@pytest.mark.parametrize("name_gives", ["127.0.1.1", None])  # Debian, and a name that nobody knows
def test_this_machine_listens_where_others_reach_it(monkeypatch, name_gives: str | None) -> None:
    def look_up(name: str) -> str:
        if name_gives is None:
            raise socket.gaierror(-2, "Name or service not known")
        return name_gives

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setattr(network, "address_towards", lambda urls: "10.1.2.3")
    assert listen_address(NODE) == "10.1.2.3"
    name_gives = "10.1.2.4"
    assert listen_address(NODE) == "10.1.2.4"
