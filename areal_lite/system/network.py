"""Addresses and ports of this machine."""

import errno
import random
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")

NODE = "node"  # the value of `server.host` that means this machine's own address

_ANYWHERE = "http://203.0.113.1"  # behind the default route: no machine has this address
# Linux gives ports from 32768 up to outgoing connections. One of these might be taken before a
# server, which needs seconds to load, binds it.
_PORTS = range(20000, 32768)


def listen_address(host: str) -> str:
    """Return `server.host` as an address, `node` as an address that other machines reach."""
    if host != NODE:
        return host
    with suppress(OSError):  # nobody knows the name of this machine
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):  # as Debian's /etc/hosts says
            return address
    with suppress(OSError):  # no network
        return address_towards([_ANYWHERE])
    return LOOPBACK[0]


def address_towards(urls: Iterable[str]) -> str:
    """Return the address of this machine that the hosts of `urls` can reach."""
    remote = [host for url in urls if (host := urlsplit(url).hostname) not in LOOPBACK]
    if not remote:
        return LOOPBACK[0]
    # Connecting a UDP socket picks the interface that routes there, and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))
        return probe.getsockname()[0]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a random port that nothing listens on now. Raises OSError when there is none."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise OSError(
        errno.EADDRINUSE, f"no port of {host} from {_PORTS.start} to {_PORTS.stop - 1} is free"
    )


def allow_many_connections() -> None:
    """Let this process open as many descriptors as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
