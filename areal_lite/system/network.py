"""Addresses and ports of this machine."""

import errno
import random
import resource
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")

NODE = "node"
"""The value of `server.host` that means this machine's own address."""

# Linux gives ports from 32768 up to outgoing connections. One of these might be taken before a
# server, which needs seconds to load, binds it.
_PORTS = range(20000, 32768)


def listen_address(host: str) -> str:
    """Return `server.host` as an address. For `node` it is the address of this machine's name.

    Raises OSError, which names the machine, when that has none.
    """
    if host != NODE:
        return host
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        reason = f"{name}, the name of this machine, has no address: add it to /etc/hosts"
        raise OSError(error.errno, f"{reason} ({error.strerror})") from None


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
