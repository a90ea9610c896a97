"""A workflow that hangs, blocks, crashes, exits or takes all memory for one prompt in twenty."""

import asyncio
import os
import sys
import time
import zlib

from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory

_FAULTS = ("hang", "block", "crash", "exit", "leak")


async def workflow(episode: Episode) -> Trajectory:
    """Answer once, or do what the prompt's id says."""
    transcript = Transcript(episode)
    await transcript.sample()
    match dict(enumerate(_FAULTS)).get(zlib.crc32(episode.prompt.prompt_id.encode()) % 100):
        case "hang":
            await asyncio.Event().wait()
        case "block":
            time.sleep(3600)
        case "crash":
            os._exit(1)
        case "exit":
            sys.exit()
        case "leak":
            raise MemoryError
    return transcript.trajectory()
