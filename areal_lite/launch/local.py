"""`areal-lite train` on one machine: the supervisor. It starts servers, controller and trainer ranks, watches them, and ends them all.

Everything starts at once: the controller waits for servers to be announced, the trainer for its first batch. If any role fails the run ends,
with the end of that role's log; however the run ends, no process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

from rich.console import Console

from areal_lite.config import ServerConfig, TrainConfig, save_config
from areal_lite.launch.placement import place, visible, visible_gpus
from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.observe.metrics import read_metrics, write_json
from areal_lite.observe.progress import FollowedProgress
from areal_lite.observe.report import summary_table, write_report
from areal_lite.observe.summary import build_summary
from areal_lite.rollout.server import ServerProcess, announce, free_port, resolve_device, withdraw
from areal_lite.rollout.sglang_readback import ENV_READBACK


def run(config: TrainConfig) -> int:
    """Train, then write summary.json and report.png and show the summary; its path is the last line. Returns the exit status."""
    run_dir = Path(config.run_dir)
    started = time.time()
    print(f"run directory: {run_dir}", file=sys.stderr)
    try:
        train(config, run_dir)
    except (RuntimeError, TimeoutError, KeyboardInterrupt) as error:
        if not isinstance(error, KeyboardInterrupt):
            print(f"areal-lite: {error}", file=sys.stderr)
        if read_metrics(run_dir):
            finish(config, run_dir, started)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finish(config, run_dir, started)
    print(run_dir / "summary.json")
    return 0


def train(config: TrainConfig, run_dir: Path) -> None:
    """All roles, from start to end. Raises RoleFailed."""
    gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
    placement = place(gpus, config.trainer, config.server, config.sync.transport)
    save_config(config, run_dir)
    readback = {ENV_READBACK: "1"} if config.sync.verify else {}
    with servers(config.server, config.model, config.seed, run_dir, placement.servers, readback) as fleet, Roles(run_dir) as roles:
        controller = roles.start("controller", [sys.executable, "-m", "areal_lite.rollout.controller", str(run_dir)])
        ranks = roles.start_ranks("trainer", "areal_lite.trainer.loop", run_dir, config.trainer, placement.trainer)
        wait_ready(fleet, run_dir, roles)
        progress = FollowedProgress(run_dir, "metrics", config.trainer.steps, "step", step_fields)
        roles.wait([*ranks, controller], watch=lambda: (progress.show(), check_servers(fleet)))
        progress.close()


@contextlib.contextmanager
def servers(config: ServerConfig, model: str, seed: int, run_dir: Path, gpus: list[list[str]], environment: dict[str, str]):
    """Start `config.count` servers, each on its `gpus`; they are ended on leaving. Yields them, not yet ready."""
    fleet = [
        ServerProcess(
            config,
            model,
            name=f"server-{i}",
            port=config.port + i if config.port else free_port(config.host),
            seed=seed + i,
            log_path=run_dir / "logs" / f"server-{i}.log",
            environment={"GLOO_SOCKET_IFNAME": "lo", **visible(gpus[i]), **environment},
        )
        for i in range(config.count)
    ]
    try:
        for server in fleet:
            server.start()
        yield fleet
    finally:
        for server in fleet:
            server.stop()
            withdraw(run_dir, server.name)


def wait_ready(fleet: list[ServerProcess], run_dir: Path, roles: Roles | None = None) -> None:
    """Announce each server as soon as it answers. Raises what ends the wait early: a server's failure or a role's."""
    started = time.monotonic()

    async def ready(server: ServerProcess) -> None:
        await server.wait_ready()
        announce(run_dir, server.info)
        print(f"{server.name} ready after {time.monotonic() - started:.0f} s", file=sys.stderr)

    async def all_ready() -> None:
        pending = {asyncio.create_task(ready(server)) for server in fleet}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if roles:
                    roles.check()
        finally:
            for task in pending:
                task.cancel()

    asyncio.run(all_ready())


def check_servers(fleet: list[ServerProcess]) -> None:
    """Raise RoleFailed when no server is left: with one gone training goes on."""
    if all(server.exit_code() is not None for server in fleet):
        raise RoleFailed(f"every server has exited; see {fleet[0].log_path}")


def step_fields(step: dict) -> dict:
    """What the progress line says of a training step."""
    return {
        "reward": step["reward_mean"],
        "staleness": step["staleness_mean"],
        "tok_per_s": step["tokens"] / step["time_s"],
        "pause": f"{1000 * step['pause_s']:.0f} ms",
    }


def finish(config: TrainConfig, run_dir: Path, started: float) -> None:
    """Count up what happened, draw it, show it."""
    summary = build_summary(run_dir, config, started, time.time())
    summary["report"] = str(write_report(run_dir))
    write_json(run_dir / "summary.json", summary)
    console = Console(stderr=True)
    console.print(summary_table(summary))
    console.print(f"run directory: {run_dir}\nreport: {summary['report']}", highlight=False, soft_wrap=True)
