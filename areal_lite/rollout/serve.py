"""`python -m areal_lite.rollout.serve <arguments of sglang.launch_server>`: a stock SGLang server that dies with its parent.

The processes that SGLang spawns import this module again (as `__mp_main__`) before anything of SGLang: what must be in place in
every process of a server is put there at module level.
"""

from __future__ import annotations

import sys

if __name__ in ("__main__", "__mp_main__"):
    from areal_lite.rollout.sglang_cpu.torchvision import stand_in_for_torchvision

    stand_in_for_torchvision()


def main(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    from areal_lite.launch.process import die_with_parent

    die_with_parent()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        import os

        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
