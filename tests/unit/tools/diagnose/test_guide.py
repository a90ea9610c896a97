"""The page about findings says what the code does."""

import re
import runpy
from pathlib import Path

from areal_lite.run_dir.metrics import STEP_KEYS, read_metrics
from areal_lite.tools.diagnose import failures, history, learning, signals, speed
from areal_lite.tools.diagnose.diagnosis import GUIDE
from areal_lite.tools.diagnose.history import LIMITS
from areal_lite.tools.metric_table import GROUPS, MEANINGS
from tests.unit.tools.report.recorded_run import unpack

# Not in the recorded run: metrics of a batch with fresh and with older tokens, and of settings.
# The run is also older than some metrics, and than the removal of others.
REMOVED = {"dropped_groups"}
CONDITIONAL = {"mismatch_square", "stale_square", "server_lag"}
CONDITIONAL |= {"passed_groups", "straggler_wait_s", "reference_kl", "routes_changed"}
CONDITIONAL |= {"quarantined_prompts", "adapter_share", "drain_s", "extreme_ratios"}
CONDITIONAL |= {"value", "value_error", "value_explained", "value_clip_fraction"}
CONDITIONAL |= {"critic_loss", "critic_grad_norm", "critic_lr", "critic_skipped"}
CONDITIONAL |= {f"judge_{x}" for x in "calls failed cached tokens p50_s p99_s".split()}
CONDITIONAL |= {"store_mib", "traces_mean", "epochs", "resting_prompts"}
CONDITIONAL |= {"admission_lead", "computed_share"}  # the recorded run is older
CONDITIONAL |= {"mfu"}  # it ran without a GPU
ROOT = Path(__file__).resolve().parents[4]
PAGE = runpy.run_path(str(ROOT / "docs/diagnose_page.py"))


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/diagnose.md").read_text() == PAGE["page"](), (
        "write it again: python docs/diagnose_page.py > docs/diagnose.md"
    )


def test_every_metric_of_a_run_is_explained(tmp_path: Path) -> None:
    known = MEANINGS.keys()
    assert sum(map(len, GROUPS.values())) == len(known) and known >= set(STEP_KEYS)
    logged = {key for line in read_metrics(unpack("async", tmp_path)) for key in line} - REMOVED
    assert logged <= known <= logged | CONDITIONAL
    assert PAGE["METRICS"].keys() <= {advice.name for advice in GUIDE}
    used = {key for keys in PAGE["METRICS"].values() for key in keys.split()}
    assert used | PAGE["HEALTHY"].keys() <= known


def test_every_threshold_is_used_and_every_explanation_exists() -> None:
    modules = (failures, learning, signals, speed, history)
    source = "".join(Path(module.__file__).read_text() for module in modules)
    assert set(re.findall(r'limit\("(\w+)"\)', source)) == LIMITS.keys()
    names = [advice.name for advice in GUIDE]
    assert len(set(names)) == len(names)
    assert {name for advice in GUIDE for name in advice.unless} <= set(names)
