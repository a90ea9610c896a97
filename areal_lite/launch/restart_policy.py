"""Decide what follows a failure of the controller or a trainer rank: a restart, or the end.

A start from the newest checkpoint is the same as that of `resume=auto` (run_dir/resume.py). A
process that was killed or hangs is started again, a limited number of times. After an error it is
started again only if that can help: not before the first step, and not twice at the same place.

Pure: no process, no file and no clock.
"""

import re
from dataclasses import dataclass

from areal_lite.config import RestartConfig
from areal_lite.system.clock import back_off_s

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a process, and with it of all processes of controller and trainer.

    Args:
        at_s: when it was noticed, in seconds of any clock.
        error: what identifies the error that it reported; None if it was killed or hung.
        progressed: whether a training step was completed since the start of the process and
            steps are left.
    """

    at_s: float
    error: str | None = None
    progressed: bool = False


@dataclass(frozen=True)
class Restart:
    """Start controller and trainer again after `delay_s` seconds, for the `number`-th time."""

    delay_s: float
    number: int


@dataclass(frozen=True)
class GiveUp:
    """End the run, for this reason."""

    reason: str


def decide(failures: list[Failure], limits: RestartConfig) -> Restart | GiveUp:
    """Decide what follows the last of `failures`, which are all of this run, the oldest first."""
    last = failures[-1]
    recent = [one for one in failures if last.at_s - one.at_s <= limits.window_s]
    if limits.max == 0:
        return GiveUp("restart.max=0: nothing is started again")
    if last.error is not None and not last.progressed:
        return GiveUp(
            "no step was completed before this error, or none is left: another start would fail "
            "like this one"
        )
    if last.error is not None and last.error in (one.error for one in recent[:-1]):
        return GiveUp("the same error came twice: another start would fail like this one")
    if len(recent) > limits.max:
        return GiveUp(
            f"there were {limits.max} restarts within {limits.window_s:g} s (restart.max)"
        )
    return Restart(back_off_s(len(recent)), len(recent))


def error_identity(log: str) -> str:
    """Return the place and the message of an error, which are equal for two reports of it.

    `log` ends with the report. Numbers in the message may differ, such as that of a step.
    """
    frames = list(_FRAME.finditer(log))
    place = f"{frames[-1]['file']}:{frames[-1]['line']} " if frames else ""
    lines = [line for line in log.splitlines() if line.strip()]
    return place + re.sub(r"\d+", "#", lines[-1] if lines else "")
