"""`python -m areal_lite.rollout.serve <arguments of sglang.launch_server>`: a stock SGLang server that dies with its parent.

SGLang's own workers ask the kernel to be killed when this process dies, so that one promise covers the whole server.
"""

from __future__ import annotations

import os
import sys

from areal_lite.launch.process import die_with_parent
from areal_lite.rollout.sglang_cpu.torchvision import stand_in_for_torchvision


def main(argv: list[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    die_with_parent()
    stand_in_for_torchvision()  # before anything of SGLang

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
