"""The rounding of pushed adapters to bfloat16: benchmarks/adapter_rounding.py on a random model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lite_quickstart.make_model import build_char_tokenizer
from tests.ranks.test_engine import make_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_servers_see_adapters_that_are_not_tiny(tmp_path: Path) -> None:
    make_model("qwen3_tied", tmp_path / "model")
    build_char_tokenizer().save_pretrained(tmp_path / "model")
    command = ["benchmarks/adapter_rounding.py", tmp_path / "model", tmp_path / "out.json"]
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, timeout=200)
    rows = {row["share"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    for row in rows.values():
        assert row["apart"] < 2 * row["bfloat16"], "the sum is rounded as everything else is"
    assert rows[0.0005]["seen"] < 0.7, "bfloat16 rounds most of them away"
    assert all(0.9 < row["seen"] < 1.1 for share, row in rows.items() if share >= 0.005)
