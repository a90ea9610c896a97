"""The panel of a warm-up."""

from areal_lite.config import SftConfig
from areal_lite.quickstart.launch_sft import WarmUpWatch
from areal_lite.report.panel import Row
from areal_lite.report.progress import progress_line
from areal_lite.run_dir.metrics import append_event


def test_the_view_of_a_warm_up(tmp_path):
    config = SftConfig(model="model", out="warm", run_dir=str(tmp_path))
    config.trainer.steps, config.batch_size = 100, 32
    watch = WarmUpWatch(config, tmp_path)
    view = watch.view()
    assert (view.done, view.total, view.eta_s) == (0, 100, None)
    assert view.waits == [Row("trainer", "loads the model")]
    for step in range(1, 61):  # the first ten are not recent
        time_s = 5.0 if step <= 10 else 0.5
        append_event(tmp_path, "sft", {"step": step, "time_s": time_s, "loss": 3.0 / step})
    view = watch.view()
    assert (view.done, view.eta_s) == (60, 20.0)
    rows = {row.name: row.value for section in view.sections for row in section.rows}
    assert rows == {"loss": "0.05 █▃▂▂▁▁▁▁▁▁", "demonstrations": "64/s"}
    assert progress_line(view, 30.0) == "warm-up step 60/100 · loss 0.05 · ETA 0:20"
