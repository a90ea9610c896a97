"""A stock SGLang server that ends with its parent process.

    python -m areal_lite.launch.serve <arguments of sglang.launch_server>

SGLang's own workers ask the kernel to be killed when this process dies. The API key comes through
the environment: every user of the machine can read command lines.
"""

import gc
import logging
import os
import sys

from areal_lite import sglang_plugins
from areal_lite.extensions import cpu_device
from areal_lite.system.processes import die_with_parent

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    die_with_parent()
    gc.disable()  # what imports make stays, and each collection would visit all of it
    if key := os.environ.pop(sglang_plugins.ENV_API_KEY, None):
        argv = [*argv, "--api-key", key]

        def hide_key(record: logging.LogRecord) -> bool:  # SGLang logs its arguments
            record.msg = record.getMessage().replace(key, "***")
            record.args = ()
            return True

        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(hide_key)
    if os.environ.get(sglang_plugins.ENV_DEVICE) == "cpu":
        cpu_device().prepare_server()  # before the first import of SGLang

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from areal_lite.sglang_plugins.push import check_hooks

    load_plugins()
    if not sglang_plugins.installed:
        log.warning(
            "areal_lite's SGLang plugins are not installed here, and a push over NCCL would fail:"
            " install areal_lite again"
        )
    else:
        check_hooks()
    gc.freeze()
    gc.enable()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
