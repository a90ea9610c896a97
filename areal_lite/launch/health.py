"""A health check for containers: `python -m areal_lite.launch.health RUN_DIR`.

The exit status is 0 if at least one server is announced and every announced server answers.
"""

import sys
from pathlib import Path

from areal_lite.servers.blocking import is_reachable
from areal_lite.servers.registry import announced_servers

_TIMEOUT_S = 10.0


def healthy(run_dir: Path) -> bool:
    """Ask every announced server for an answer."""
    servers = announced_servers(run_dir)
    return bool(servers) and all(is_reachable(server, _TIMEOUT_S) for server in servers)


if __name__ == "__main__":
    sys.exit(not healthy(Path(sys.argv[1])))
