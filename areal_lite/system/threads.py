"""Work on daemon threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start_daemon(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `function` on a daemon thread. One that hangs never keeps the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # the caller of `future.result` gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "call")).start()
    return future
