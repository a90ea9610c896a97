"""Run `areal-lite eval`: servers of a checkpoint, without a training run."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_lite.config import ServerConfig, save_config
from areal_lite.controller.evaluation import (
    Interval,
    Scores,
    failed_answers,
    pooled,
    score_problems,
)
from areal_lite.controller.sources import Dependencies, open_sources
from areal_lite.data.model_folder import check_model_folder
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.launch import preflight
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import ServerPool, server_pool
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.run_dir.resume import lock_run_dir, remove_files
from areal_lite.servers.fleet import open_fleet
from areal_lite.system.files import write_json
from areal_lite.system.gpus import divide_gpus, resolve_device, visible_gpus
from areal_lite.tools.commands import EvalCommandConfig
from areal_lite.tools.formatting import excerpt
from areal_lite.workers.pool import TaskFailed

_SHOWN = 400  # characters of a prompt


def check(config: EvalCommandConfig) -> None:
    """Check the model, the data and the machine. Raises ValueError."""
    preflight.check_model("model", config.model)
    preflight.check_sources(config)
    preflight.check_servers(config.server, config.model)
    preflight.check_run_dir_of(config)


def run(config: EvalCommandConfig) -> int:
    """Start servers, evaluate, and stop them. Returns the exit status."""
    run_dir = Path(config.run_dir)
    with lock_run_dir(run_dir):
        remove_files(run_dir)
        check_model_folder(Path(config.model))
        save_config(config, run_dir)
        work = map(_evaluate, [config], [run_dir])  # lazily: once the servers are up
        with_servers(config.server, config.model, config.seed, run_dir, work)
    return 0


def with_servers(
    server: ServerConfig,
    model: str,
    seed: int,
    run_dir: Path,
    work: Iterable[Coroutine[Any, Any, None]],
) -> None:
    """Do each piece of `work` while servers of a model are up.

    The servers have all visible GPUs, as there is no trainer. Raises RuntimeError or TimeoutError
    if a server fails.
    """
    visible = visible_gpus() if resolve_device(server.device) == "cuda" else []
    gpus = dict(enumerate(divide_gpus(visible, server.count, server.tensor_parallel)))
    with server_pool(server, model=model, seed=seed, run_dir=run_dir, gpus=gpus) as pool:
        pool.wait_ready()
        for piece in work:
            asyncio.run(_while_servers_last(piece, pool))


async def _while_servers_last(work: Coroutine[Any, Any, None], pool: ServerPool) -> None:
    """Wait for `work`. Raises RoleFailed when no server is left."""
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        try:
            pool.check()
        except RoleFailed:
            task.cancel()
            raise
    task.result()


def reading(tokenizer: Tokenizer, text: str, raw: bool) -> list[str]:
    """Show the first prompt, `raw` or made by a chat template, and what may be wrong with it."""
    lines = [f"the first one, as the model reads it: {excerpt(text, _SHOWN)}"]
    if raw and marks_turns(tokenizer):
        lines.append("caution: it leaves out the tokenizer's chat template (data.chat, raw)")
    ends = end_of_turn(tokenizer, raw)
    return lines + ([f"caution: {ends}"] if ends else [])


def marks_turns(tokenizer: Tokenizer) -> bool:
    """Return whether a chat template marks who says what."""
    with suppress(ValueError):
        return tokenizer.render([{"role": "user", "content": "?"}]) != "?"
    return False


def end_of_turn(tokenizer: Tokenizer, raw: bool = False) -> str | None:
    """Say what ends an answer if files or template (unless `raw`) disagree; None if not."""
    if not tokenizer.eos_ids:
        return "no token ends an answer: set eos_token_id in generation_config.json"
    names = {number: name for name, number in tokenizer.ids.items()}
    stops = " and ".join(
        f"{names.get(i)!r} ({', '.join(files) or 'tokenizer.json'})"
        for i, files in tokenizer.ends.items()
    )
    with suppress(ValueError):  # no template, or one for a single turn
        text = "" if raw else tokenizer.render_after_answer([])
        last = tokenizer.encode(text, add_special_tokens=False)[:1]
        if last and last[0] not in tokenizer.eos_ids:
            return (
                f"the chat template ends a turn with {names.get(last[0])!r}, and answers end at "
                f"{stops}: add its id to eos_token_id in generation_config.json"
            )
    named = [set(files) for files in tokenizer.ends.values() if files]
    agree = not named or set.intersection(*named)  # or a file names all of them
    return None if agree else f"answers end at {stops}, as these files name different tokens"


async def _evaluate(config: EvalCommandConfig, run_dir: Path) -> None:
    """Print the accuracies of each data source and write them to summary.json."""
    scores: dict[str, Scores] = {}
    tokenizer = Tokenizer(config.model, config.data.chat_template_kwargs)
    async with open_sources(config, run_dir) as sources, open_fleet(run_dir, config.seed) as fleet:
        parts = Dependencies(sources=sources, tokenizer=tokenizer, store=None, clock=time.time)
        for name, source in sources.items():
            with suppress(TaskFailed):  # it counts as a failed answer
                first = await source.prompt("eval", 0)
                lines = reading(tokenizer, first.text, raw=not first.messages)
                print(*lines, sep="\n", file=sys.stderr)
            rids, counts = f"eval{name}", (config.problems, config.samples)
            scores[name] = await score_problems(source, parts, fleet, *counts, rids, Counter())
    _report(config, run_dir, scores)


def _report(config: EvalCommandConfig, run_dir: Path, scores: Mapping[str, Scores]) -> None:
    records = {name: one.record() for name, one in scores.items()}
    summary: dict[str, Any] = {"model": config.model, **pooled(list(scores.values())).record()}
    if config.data.sources:
        summary["sets"] = records
    write_json(run_dir / SUMMARY_FILE, summary)
    for name, record in records.items():
        title = f"{name}: " if name else ""
        print(f"{title}{record['problems']} held-out problems, with 95 % intervals:")
        print(_row("greedy", record["greedy"], record["greedy_interval"]))
        for k, share in record["pass_at_k"].items():
            print(_row(f"pass@{k}", share, record["pass_at_k_intervals"][k]))
        if failures := failed_answers(record):
            print(f"  {failures}")
    print(run_dir / SUMMARY_FILE)


def _row(name: str, value: float, interval: Interval | None) -> str:
    ends = "" if interval is None else "  ({:.3f} to {:.3f})".format(*interval)
    return f"  {name:<8}{value:.3f}{ends}"
