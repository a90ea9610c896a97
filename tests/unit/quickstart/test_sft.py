"""The panel of a warm-up, and how it is stopped."""

import time

from areal_lite.launch.roles import Role, Roles
from areal_lite.run_dir.metrics import append_event
from areal_lite.run_dir.resume import STOPPED
from areal_lite.tools.report.panel import progress_line
from areal_lite_quickstart import sft
from areal_lite_quickstart.command import SftConfig
from areal_lite_quickstart.sft import warm_up_view


def test_the_view_of_a_warm_up(tmp_path):
    config = SftConfig(model="model", out="warm", run_dir=str(tmp_path))
    config.trainer.steps, config.batch_size = 100, 32
    view = warm_up_view(config, tmp_path)
    assert (view.done, view.total, view.eta_s) == (0, 100, None)
    assert view.waits == {"trainer": "loads the model"}
    for step in range(1, 61):  # the first ten are not recent
        time_s = 5.0 if step <= 10 else 0.5
        append_event(tmp_path, "sft", {"step": step, "time_s": time_s, "loss": 3.0 / step})
    view = warm_up_view(config, tmp_path)
    assert (view.done, view.eta_s) == (60, 20.0)
    rows = {name: value for rows in view.sections.values() for name, value in rows.items()}
    assert rows == {"loss": "0.05 █▃▂▂▁▁▁▁▁▁", "demonstrations": "64/s"}
    assert progress_line(view, 30.0) == "warm-up step 60/100 · loss 0.05 · ETA 0:20"


def test_a_warm_up_whose_loss_is_not_finite_goes_on(tmp_path):
    for step, loss in enumerate((2.5, float("nan")), start=1):
        append_event(tmp_path, "sft", {"step": step, "time_s": 1.0, "loss": loss})
    view = warm_up_view(SftConfig(model="model", out="warm"), tmp_path)
    assert view.line == ["loss not finite"]
    assert view.sections["learning"] == {"loss": "not finite ▁"}


def test_a_stop_ends_a_warm_up_at_once(tmp_path, monkeypatch):
    def start_ranks(roles, *_) -> list[Role]:
        (tmp_path / "stop").touch()
        return [roles.start("trainer", ["sleep", "100"])]

    monkeypatch.setattr(Roles, "start_ranks", start_ranks)
    monkeypatch.setattr(sft, "check_model_folder", lambda folder: None)
    (tmp_path / "stop").touch()  # of an earlier start: it does not count
    started = time.monotonic()
    config = SftConfig(model="m", out=str(tmp_path / "out"), run_dir=str(tmp_path))
    assert sft.run(config) == STOPPED
    assert time.monotonic() - started < 30 and not (tmp_path / "out").exists()
