"""Run one program on many tests in one process of the sandbox, which has no copy of this package.

program.py sends this file's source there, and a task on standard input, in JSON: `program` (its
source), `time_s` (processor seconds of one test), and one of

    inputs      the standard input of each run: the program runs from the start for each
    calls       the arguments of each call of `function`, which may be a method of `Solution`
    statements  source that runs after the program, in its namespace, and ends by `done`, a word

Each test answers with a line of JSON on standard output: what was printed or returned, or `done`.
The first test that fails ends the process. SIGPROF ends a test that takes too long.
"""

import atexit
import builtins
import json
import os
import signal
import sys
import threading
import types


def main() -> None:
    """Run the task of standard input."""
    task = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")

    def answer(result: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        json.dump(result, answers, default=plain)
        answers.write("\n")
        answers.flush()

    program = compile(task["program"], "program.py", "exec")
    signal.setitimer(signal.ITIMER_PROF, task["time_s"])
    for descriptor in (0, 1):  # files, which a next run can empty
        os.dup2(os.open(f"fd{descriptor}", os.O_RDWR | os.O_CREAT), descriptor)
    if "inputs" in task:
        for given in task["inputs"]:
            signal.setitimer(signal.ITIMER_PROF, task["time_s"])
            answer(printed(program, given))
        return
    namespace = new_module("program").__dict__
    run(program, namespace)
    if "statements" in task:
        exec(compile(task["statements"], "tests.py", "exec"), namespace)
        answer(task["done"])
        return
    name = task["function"]
    function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
    for arguments in task["calls"]:
        signal.setitimer(signal.ITIMER_PROF, task["time_s"])
        answer(function(*arguments))


def plain(value: object) -> object:
    """Return what JSON has for a number or an array of numpy; of anything else its text."""
    return getattr(value, "tolist", lambda: repr(value))()


def printed(program: types.CodeType, given: str) -> str:
    """Return what the program prints when it reads `given`. Raises what ends it with an error."""
    for descriptor in (0, 1):
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(0, given.encode(errors="replace"))
    os.lseek(0, 0, os.SEEK_SET)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)
    stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = sys.__stdout__ = stdout
    run(program, new_module("__main__").__dict__)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if not stdout.closed:
        stdout.flush()
    return os.pread(1, os.lseek(1, 0, os.SEEK_END), 0).decode(errors="replace")


def new_module(name: str) -> types.ModuleType:
    """Return an empty module for the program, as `import __main__` finds it, too."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


def run(program: types.CodeType, namespace: dict) -> None:
    """Run the program; `exit()` and `exit(0)` are an end like any other."""
    try:
        exec(program, namespace)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
