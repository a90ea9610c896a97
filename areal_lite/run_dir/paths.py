"""The layout of a run directory: every file and folder name, once.

run_dir/
    config.yaml               the resolved configuration (config-N.yaml: of earlier starts)
    metrics.jsonl             one line per training step
    evals.jsonl               one line per evaluation
    proximal.jsonl            one line per training step: log-probs of one group before the step
    trajectories.sqlite       rollout groups and their trajectories
    summary.json              written at the end, with report.png and report.html
    trace.json                written by `areal-lite report --trace`
    checkpoints/              step-N/ (complete once it has a manifest.json), hf/ (last weights)
    exports/                  step-N/: checkpoints that `areal-lite export` has converted
    weights/                  what `sync.transport=disk` hands to the servers
    bad_batches/              batches whose update was skipped
    logs/                     one file per process
    heartbeats/               ROLE: the phase of a process, written while it runs
    servers/                  NAME.json: a running server; NAME.unhealthy: it must be replaced
    controller.json           address of the controller while it runs
    controller_status.json    what the controller has and waits for, while it runs
    controller_totals.json    what the controller counted, written when it ends
    openai_endpoint.json      address of the agents' endpoint while it runs
    job.sbatch                the Slurm job
    stop                      asks the run to stop after its step
    lock                      held by the command that writes here
    controller.lock           held by the controller
"""

from pathlib import Path

from areal_lite.config.files import CONFIG_FILE as CONFIG_FILE

METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
STORE_FILE = "trajectories.sqlite"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.png"
PAGE_FILE = "report.html"
TRACE_FILE = "trace.json"
PROXIMAL_FILE = "proximal.jsonl"
TOTALS_FILE = "controller_totals.json"

CHECKPOINTS_DIR = "checkpoints"
CHECKPOINT_MARKER = "manifest.json"
"""The manifest of a checkpoint is written last: a folder that has one is complete."""
HF_DIR = "hf"
EXPORTS_DIR = "exports"
WEIGHTS_DIR = "weights"
BAD_BATCHES_DIR = "bad_batches"
LOGS_DIR = "logs"
HEARTBEATS_DIR = "heartbeats"

SERVERS_DIR = "servers"
CONTROLLER_FILE = "controller.json"
CONTROLLER_STATUS_FILE = "controller_status.json"
OPENAI_ENDPOINT_FILE = "openai_endpoint.json"

SLURM_JOB_FILE = "job.sbatch"
STOP_FILE = "stop"
LOCK_FILE = "lock"
CONTROLLER_LOCK_FILE = "controller.lock"


def check_run_dir(run_dir: Path) -> None:
    """Raise ValueError when `run_dir` is not the folder of a run."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: there is no such folder")
    files = (CONFIG_FILE, METRICS_FILE, STORE_FILE)
    if not any((run_dir / file).exists() for file in files):
        raise ValueError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
