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


def test_a_machine_whose_name_has_no_address_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    with pytest.raises(OSError, match="nowhere.invalid, the name .*: add it to /etc/hosts"):
        listen_address(NODE)
