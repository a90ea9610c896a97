"""A worker that evaluates expressions: `python -m tests.unit.workers.evaluating`.

Its template has loaded numpy's random numbers, and writes a line to a file when it prepares.
"""

import ctypes
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.random

from areal_lite.workers import process

NAMES = {
    module.__name__: module
    for module in (ctypes, os, random, resource, signal, sys, time, numpy, process)
}
np.ones((400, 400)) @ np.ones((400, 400))  # it uses the threads of its library


def prepare(notes: str) -> Callable[[], dict[str, object]]:
    def note(what: str) -> None:
        with open(notes, "a") as file:
            file.write(f"{what}\n")

    def load() -> dict[str, object]:
        note("loaded")
        return {"prepared": prepared}

    note("prepared")
    prepared = os.getpid()
    return load


def descriptors(pid: int | str = "self") -> list[str]:
    """Return what a process has open, without numbers."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        if descriptor.is_symlink():  # the one of this listing has ended
            found.append(os.readlink(descriptor).partition(":")[0].partition("#")[0])
    return sorted(found)


def main() -> None:
    pipes, names = process.start_worker(prepare)
    pipes.send(process.Ready())
    while (messages := pipes.receive()) is not None:
        for message in messages:
            expression = process.unpack(message.body, str)
            value = eval(expression, NAMES | names | {"descriptors": descriptors})
            body = process.pack(value)
            pipes.send(process.Done(number=message.number, seconds=0.0, body=body))


if __name__ == "__main__":
    main()
