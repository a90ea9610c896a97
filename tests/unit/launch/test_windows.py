"""A run whose sequences fill a window that its servers leave out does not start."""

import json

import pytest

from areal_lite.config import TrainConfig
from areal_lite.launch.preflight import check_window

WINDOW = {"sliding_window": 1000}


@pytest.mark.parametrize(
    "config, device, refused",
    [
        (WINDOW | {"model_type": "mistral"}, "cuda", True),
        (WINDOW | {"model_type": "mistral"}, "cpu", False),
        ({"model_type": "mistral", "sliding_window": 1100}, "cuda", False),
        ({"model_type": "mistral", "sliding_window": None}, "cuda", False),
        (WINDOW | {"model_type": "qwen2", "use_sliding_window": True}, "cuda", True),
        (WINDOW | {"model_type": "qwen2", "use_sliding_window": False}, "cuda", False),
        (WINDOW | {"model_type": "qwen3"}, "cuda", False),
        (WINDOW | {"model_type": "smollm3", "use_sliding_window": True}, "cpu", True),
        (WINDOW | {"model_type": "olmo3"}, "cuda", False),
    ],
)
def test_windows_that_servers_leave_out(tmp_path, config, device, refused):
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = TrainConfig(model=str(tmp_path))
    run.server.device, run.data.max_prompt_tokens, run.rollout.max_new_tokens = device, 900, 200
    if not refused:
        check_window(run)
        return
    with pytest.raises(ValueError, match="1100, be at most that"):
        check_window(run)
