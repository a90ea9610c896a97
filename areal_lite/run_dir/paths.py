"""The layout of a run directory: every file and folder name, once."""

# The resolved configuration, and config-N.yaml of earlier starts.
from areal_lite.config.files import CONFIG_FILE as CONFIG_FILE

METRICS_FILE = "metrics.jsonl"  # one line per training step
EVALS_FILE = "evals.jsonl"  # one line per evaluation
PROXIMAL_FILE = "proximal.jsonl"  # one per step: log-probs of one group before the step
STORE_FILE = "trajectories.sqlite"  # rollout groups and their trajectories
JUDGE_FILE = "judge.sqlite"  # the rewards that a judge gave, by the content of the request
SUMMARY_FILE = "summary.json"  # written at the end
REPORT_FILE = "report.png"  # pictures of the run
PAGE_FILE = "report.html"  # the report as a page

CHECKPOINTS_DIR = "checkpoints"  # with folders step-N
CHECKPOINT_MARKER = "manifest.json"  # of a step, written last: a folder that has one is complete
HF_DIR = "hf"  # in checkpoints: the last weights
EXPORTS_DIR = "exports"  # with folders step-N: checkpoints that `areal-lite export` has converted
WEIGHTS_DIR = "weights"  # what `sync.transport=disk` hands to the servers
BAD_BATCHES_DIR = "bad_batches"  # batches whose update was skipped
LOGS_DIR = "logs"  # one file per process
PROFILE_DIR = "profile"  # what the steps that AREAL_LITE_PROFILE names did, and when

# While a run goes on.
HEARTBEATS_DIR = "heartbeats"  # ROLE: the phase of a process
SERVERS_DIR = "servers"  # NAME.json: a running server; .unhealthy: to replace; .draining: to end
CONTROLLER_FILE = "controller.json"  # address of the controller
TRAINER_FILE = "trainer.json"  # the step from which the trainer that runs has begun
CONTROLLER_STATUS_FILE = "controller_status.json"  # what the controller has and waits for
TOTALS_FILE = "controller_totals.json"  # what the controller counted, written when it ends
QUARANTINE_FILE = "quarantine.json"  # prompts that are not asked again, and why

SLURM_JOB_FILE = "job.sbatch"  # the Slurm job
STOP_FILE = "stop"  # asks the run to stop after its step
LOCK_FILE = "lock"  # held by the command that writes here
CONTROLLER_LOCK_FILE = "controller.lock"  # held by the controller
GPUS_LOCK_FILE = "gpus.lock"  # held by the trainer or by servers that start, on shared GPUs
