"""`python -m areal_lite.launch.health RUN_DIR`: exit status 0 if every server that is announced for the run answers, and there is one."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_lite.servers.blocking import is_reachable
from areal_lite.servers.registry import announced_servers

_PATIENCE_S = 10.0


def healthy(run_dir: Path) -> bool:
    servers = announced_servers(run_dir)
    return bool(servers) and all(is_reachable(server, _PATIENCE_S) for server in servers)


if __name__ == "__main__":
    sys.exit(not healthy(Path(sys.argv[1])))
