"""A bare HTTP client: aiohttp on uvloop. It reads each answer and discards it.

python -m benchmarks.controller_load.bare URL IN_FLIGHT COUNT MAX_TOKENS    # prints JSON
"""

import asyncio
import json
import os
import subprocess
import sys
import time

import aiohttp
import uvloop

from areal_lite.system.processes import dying_with_me
from benchmarks.controller_load.load import PROMPT_TOKENS, Load
from benchmarks.controller_load.server import END_TOKEN


async def send(url: str, in_flight: int, count: int, max_tokens: int) -> dict[str, float]:
    """Send `count` requests, `in_flight` at a time, in the form of the controller's requests."""
    sampling = {
        "max_new_tokens": max_tokens,
        "temperature": 1.0,
        "stop_token_ids": [END_TOKEN],
        "skip_special_tokens": False,
    }
    request = {
        "rid": "0",
        "input_ids": list(range(PROMPT_TOKENS)),
        "return_logprob": True,
        "extra_key": "0",
        "sampling_params": sampling,
    }
    body = json.dumps(request).encode()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def work(left) -> None:
            for _ in left:
                async with session.post(
                    url + "/generate", data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()

        async def all_of_them(count: int) -> None:
            left = iter(range(count))
            await asyncio.gather(*(work(left) for _ in range(in_flight)))

        await all_of_them(2 * in_flight)  # connections are made
        started, cpu = time.perf_counter(), time.process_time()
        await all_of_them(count)
    seconds = time.perf_counter() - started
    return {"per_s": count / seconds, "cpu_s_per_1000": 1000 * (time.process_time() - cpu) / count}


def measure(url: str, load: Load, count: int) -> dict[str, float]:
    """Measure the client in a process of its own."""
    numbers = [str(number) for number in (load.in_flight, count, load.max_tokens)]
    command = [sys.executable, "-m", __spec__.name, url, *numbers]
    environment = os.environ | dying_with_me()
    ran = subprocess.run(command, check=True, capture_output=True, env=environment)
    return json.loads(ran.stdout)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(send(sys.argv[1], *map(int, sys.argv[2:])))))
