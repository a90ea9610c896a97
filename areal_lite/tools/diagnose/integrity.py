"""Findings about the data: whether the run trained on what its store has (harness.py).

Each is a pure function of a history and of the store.
"""

from areal_lite.config import source_configs
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.tools.diagnose import harness
from areal_lite.tools.diagnose.harness import Fault
from areal_lite.tools.diagnose.history import History
from areal_lite.tools.diagnose.sign import Sign, alarm

# Sources whose prompts have a file order. Those of other sources may be endless.
_FILES = ("jsonl", "hf")


def stuck_batch(run: History) -> Sign | None:
    """Find a batch that came again in the next step."""
    if not _has_batches(run):
        return None
    repeated = harness.repeated_batch(run.columns, run.run_dir / STORE_FILE)
    return _sign(repeated or harness.stuck_metrics(run.columns, run.metrics))


def rogue_normalizer(run: History) -> Sign | None:
    """Find a loss over other tokens than were sampled."""
    return _sign(harness.rogue_tokens(run.columns, run.metrics)) if _has_batches(run) else None


def lost_seed(run: History) -> Sign | None:
    """Find samples or prompts that no seed has reached."""
    if not len(run.columns):
        return None
    if fault := harness.repeated_samples(run.columns, run.run_dir / STORE_FILE):
        return _sign(fault)
    sources = source_configs(run.config)
    for number, (name, own) in enumerate(sources.items()):
        fault = harness.unshuffled_prompts(run.columns, number, len(sources))
        if fault and own.data.shuffle and own.data.source in _FILES:
            return alarm(f"data source {name}: {fault.evidence}" if name else fault.evidence)
    return None


def _has_batches(run: History) -> bool:
    """Return whether the store has the trained batches: a replay buffer draws its own."""
    return bool(len(run.columns)) and not run.config.buffer.replay.capacity


def _sign(fault: Fault | None) -> Sign | None:
    return alarm(fault.evidence) if fault else None
