"""Search for inputs that break a parser, guided by the branches that each input reaches (atheris).

    python -m tests.security.coverage_fuzz TARGET [--seconds 60] [--work FOLDER]
    python -m tests.security.coverage_fuzz TARGET --input FILE    # repeat what was found

An input breaks a target if the target raises what its caller does not expect, breaks a promise,
takes more than five seconds or more than 2 GiB. The input is written to a file, which is named, and
the exit status is not 0. atheris is in the extra `dev`.
"""

import argparse
import contextlib
import functools
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["areal_lite"]):
    from areal_lite.data.prompts import _jsonl_file
    from areal_lite.rewards.gsm8k import gsm8k_reward
    from areal_lite.rewards.math import is_oversized, stated_result
    from areal_lite.rewards.program import extract_program, parse_tests
    from areal_lite.run_dir.paths import CHECKPOINT_MARKER
    from areal_lite.run_dir.resume import damage
    from areal_lite.servers.client import (
        parse_generation,
        parse_model_info,
        parse_reply,
        parse_server_info,
    )
    from areal_lite.workers.process import take_frames
    from areal_lite.workflows.endpoint.apis import APIS
    from areal_lite.workflows.endpoint.chat_request import RequestRefused, parse_body
    from areal_lite.workflows.tool_calls import AnswerParser
from tests.security import test_agent_requests as agent
from tests.security import test_server_answers as servers
from tests.unit.rollout.episodes import save_chat_tokenizer


@dataclass
class Target:
    """A parser of outside input: what runs it, and inputs to begin with."""

    run: Callable[[bytes], None]
    seeds: Iterable[bytes]


def generation(raw: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        servers.assert_promises(parse_generation(raw, servers.PARAMS))
    with contextlib.suppress(ValueError, RecursionError):
        servers.assert_promises(parse_generation(raw, servers.ROUTED, num_input=3))


def other_answers(raw: bytes) -> None:
    for parse in (parse_model_info, parse_server_info, parse_reply):
        with contextlib.suppress(ValueError, RecursionError):
            parse(raw)


def requests(raw: bytes) -> None:
    for api in APIS.values():
        with contextlib.suppress(RequestRefused, RecursionError):
            api.parse_request(parse_body(raw), 1.0, {})


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@functools.cache
def parsers() -> list[AnswerParser]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_chat_tokenizer(folder)
        return [AnswerParser(tokenizer, name, "qwen3") for name in ("hermes", "qwen", "llama3")]


def tool_calls(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    for parser in parsers():
        parsed = parser.parse(text, TOOLS)
        assert all(isinstance(arguments, dict) for _, arguments in parsed.calls)
        assert parsed.calls or parsed.said in text


def completions(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    assert gsm8k_reward(text, "#### 18") in (0.0, 1.0)
    is_oversized(stated_result(text))
    extract_program(text)
    with contextlib.suppress(ValueError):
        tests = parse_tests(text, 10.0)
        assert tests.given or tests.statements.strip()
        assert not math.isnan(tests.time_limit_s)


def worker_frames(raw: bytes) -> None:
    buffer = bytearray(raw)
    taken = list(take_frames(buffer))
    assert sum(len(frame) + 4 for frame in taken) + len(buffer) == len(raw)


def data_rows(raw: bytes) -> None:
    path = Path(tempfile.gettempdir()) / "rows.jsonl"
    path.write_bytes(raw)
    with contextlib.suppress(ValueError):
        for _, row in _jsonl_file(path):
            assert isinstance(row, dict)


def manifest(raw: bytes) -> None:
    folder = Path(tempfile.gettempdir()) / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"abc")
    (folder / CHECKPOINT_MARKER).write_bytes(raw)
    assert isinstance(damage(folder), str)


VALUES = [None, True, -1, 0, 1, 1.5, -1e39, 2**31, 2**70, "", "x", "0", [], {}, "\ud800", "\0"]
KEYS = ["", "\0", "\ud800", "..", "/dev/zero", "messages", "tools", "meta_info", "inputs"]


def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
    """Change one value of a JSON text, or bytes of any text."""
    rng = random.Random(seed)
    try:
        root = [json.loads(raw)]
    except (ValueError, RecursionError):
        return atheris.Mutate(raw, max_size)
    if rng.random() < 0.2:
        return atheris.Mutate(raw, max_size)
    places: list[tuple[Any, Any]] = []
    open_values: list[Any] = [root]
    while open_values:
        value = open_values.pop()
        found = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(found):
            places.append((value, key))
            if isinstance(inner, dict | list):
                open_values.append(inner)
    holder, key = rng.choice(places)
    other, other_key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            holder[key] = rng.choice(VALUES)
        case 1:
            holder[key] = json.loads(json.dumps(other[other_key]))
        case 2 if holder is not root:
            del holder[key]
        case 3 if isinstance(holder, dict):
            holder[rng.choice(KEYS)] = holder.pop(key)
        case _:
            holder[key] = [holder[key]] * rng.randrange(4)
    return json.dumps(root[0] if root else None).encode()[:max_size]


def encoded(values: Iterable[object]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


ANSWERS = [*encoded([*servers.HONEST.values(), *servers.LIES.values()]), *servers.BODIES.values()]
REQUESTS = [agent.chat(), agent.assistant([agent.CALL]), agent.tool_use(), *agent.WRONG.values()]
TARGETS = {
    "generation": Target(generation, [*ANSWERS, servers.routed(0, 3, 2, 1, 3, 2)]),
    "other_answers": Target(
        other_answers,
        [
            b'{"weight_version": "12", "model": "x"}',
            b'{"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.5}]}',
            b'{"version": "0.5.21", "internal": [{"a": 1}]}',
            b'{"success": true, "message": ""}',
        ],
    ),
    "requests": Target(requests, encoded(r for r in REQUESTS if isinstance(r, dict))),
    "tool_calls": Target(
        tool_calls, [b'a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>b']
    ),
    "completions": Target(
        completions,
        [
            b"So the answer is 1,234.50 dollars. #### 18",
            rb"Thus \boxed{\frac{1}{2^{100}}} or $x = 3$",
            b"```python\nprint(1)\n```",
            b'{"inputs": ["1"], "outputs": ["2"], "time_limit_s": 1}',
        ],
    ),
    "worker_frames": Target(worker_frames, [b"\x03\0\0\0abc\x01\0\0\0x", b"\0\0\0\x03abc"]),
    "data_rows": Target(data_rows, [b'{"question": "1+1", "answer": 2}\n\n{"a": null}\n']),
    "manifest": Target(
        manifest, encoded([{"weights": [3, 891568578]}, {"weights": [4, 1], "x": [0, 0]}])
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--work", type=Path, help="new folder of what is found")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    if arguments.input:
        target.run(arguments.input.read_bytes())
        return
    work = arguments.work or Path(tempfile.mkdtemp(prefix="areal_lite-fuzz-"))
    tempfile.tempdir = str(work)
    corpus = work / "corpus"
    corpus.mkdir(parents=True)
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    limits = ["-timeout=5", "-rss_limit_mb=2048", "-max_len=16384", "-print_final_stats=1"]
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={arguments.seconds}",
            f"-artifact_prefix={work}/",
            *limits,
        ],
        target.run,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
