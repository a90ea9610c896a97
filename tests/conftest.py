"""The distribution of tests over the processes of `pytest -n`, without limits of speed.

Integration and chaos tests start servers and whole runs, and some of them measure time. They stay
in one process, one after another. The files of other tests go to whichever is free, in their order:
those of trainer ranks, which take longest, come first.
"""

import signal
from typing import Any

import pytest
from hypothesis import settings

# Hypothesis fails an example that takes longer than 200 ms, which a busy machine does.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=100)

_STARTS_RUNS = {"integration", "chaos"}


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM, as a time limit sends it, stop the servers of a test as Ctrl-C does."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneIntegrationStream(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "integration" if _STARTS_RUNS & set(file.split("/")) else file

    return OneIntegrationStream(config, log)
