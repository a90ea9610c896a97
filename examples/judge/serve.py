"""Serve a model as a judge: python serve.py FOLDER PORT. It becomes an SGLang server."""

import os
import sys

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import server_command


def main() -> None:
    folder, port = sys.argv[1:]
    # The servers of a run get tokens. A judge gets text, and little of it.
    args = {"skip_tokenizer_init": False, "served_model_name": "judge", "max_total_tokens": 8192}
    command, environment = server_command(ServerConfig(args=args), folder, int(port), seed=1)
    os.execve(command[0], command, os.environ | environment)


if __name__ == "__main__":
    main()
