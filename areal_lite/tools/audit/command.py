"""Run `areal-lite audit`: print what the files of a run prove."""

from pathlib import Path

from areal_lite.tools.audit.audit import audit, audit_text
from areal_lite.tools.commands import AuditConfig
from areal_lite.tools.report.command import chosen_run


def run(config: AuditConfig) -> int:
    """Print the checks of a run; return 1 if one of them is off."""
    run_dir = Path(chosen_run(config))
    checks = audit(run_dir, config.tokens)
    print(audit_text(run_dir, checks))
    return int(any(check.wrong for check in checks))
