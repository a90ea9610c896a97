"""The profile `monitor` of docker-compose.yaml: its parts fit each other and what a run writes."""

import asyncio
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import yaml

from areal_lite.config import TrainConfig
from areal_lite.controller.service import Controller
from areal_lite.controller.sources import Dependencies
from areal_lite.run_dir.metrics import STEP_KEYS
from areal_lite.tools.report.exporter import FACTS, main
from areal_lite.trajectory import Group
from areal_lite.weights.push import PushReport
from tests.unit.controller.one_source import one_source
from tests.unit.tools.report.dashboard import (
    DASHBOARD,
    MONITORING,
    ROOT,
    expressions,
    metrics,
    of_steps,
)
from tests.unit.tools.report.synthetic_run import trajectory

COMPOSE = (ROOT / "docker-compose.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
MONITOR = {
    name: service for name, service in SERVICES.items() if service.get("profiles") == ["monitor"]
}
# Public images, and the ports on which they listen.
IMAGES = {"prometheus": 9090, "grafana": 3000}


def keys_of_a_batch_reply() -> set[str]:
    """Return the keys of the controller's reply to a request for a batch."""

    async def answer() -> dict:
        config = TrainConfig(model="model")
        config.trainer.batch_groups = 1
        tokenizer = SimpleNamespace(eos_ids=(1,), vocab_size=98)
        parts = Dependencies(
            sources=one_source(config, SimpleNamespace(num_prompts=1)),
            tokenizer=tokenizer,
            store=SimpleNamespace(submit=AsyncMock()),
            clock=lambda: 0.0,
        )
        controller = Controller(config, parts, client=None, announced=list)
        controller.batches.queue.put(
            Group(
                group_id=0,
                prompt_id="prompt",
                size=1,
                trajectories=[trajectory(0, 0, [(0, 5)], 0.0, 1.0)],
            )
        )
        return (await controller.pull(0, 0, 1))[0]

    return set(asyncio.run(answer()))


def test_the_dashboard_asks_for_what_a_run_writes() -> None:
    """Here per writer; tests/integration/test_train.py compares it with the lines of a run."""
    package = ROOT / "areal_lite"
    files = [*(package / "trainer").rglob("*.py"), package / "algo/objective.py"]
    trainer = "".join(file.read_text() for file in files)
    written = (
        set(STEP_KEYS)
        | keys_of_a_batch_reply()
        | {field.name for field in fields(PushReport)}
        | set(re.findall(r'"(\w+)"[:)]', trainer))
    )
    assert of_steps() <= written
    assert metrics("areal_lite_run_") <= set(FACTS) and metrics("areal_lite_eval_") == {
        "sampled",
        "greedy",
    }
    assert {
        "reward_mean",
        "staleness_max",
        "pause_s",
        "queue_depth",
        "loop_lag_p99_s",
    } <= of_steps()


def test_the_dashboard_asks_sglang_for_what_it_has() -> None:
    sglang = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    collector = (sglang / "srt/observability/metrics_collector.py").read_text()
    assert metrics("sglang:") and all(
        f'name="sglang:{name}"' in collector for name in metrics("sglang:")
    )
    assert "enable_metrics: " in (sglang / "srt/arg_groups/fields/observability.py").read_text()


def test_every_metric_of_the_dashboard_is_ours_or_sglangs() -> None:
    asked = re.findall(r"([\w:]+)\{|label_values\(([\w:]+),", " ".join(expressions()))
    assert (
        all((name or first).startswith(("areal_lite_", "sglang:")) for name, first in asked)
        and len(asked) > 25
    )


def test_panels_have_units_and_places_of_their_own() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not taken & cells and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(
        panel["fieldConfig"]["defaults"]["unit"] and panel["description"] for panel in panels
    )
    (source,) = yaml.safe_load((MONITORING / "grafana/datasource.yaml").read_text())["datasources"]
    used = [panel["datasource"] for panel in panels] + [
        variable["datasource"] for variable in DASHBOARD["templating"]["list"]
    ]
    assert all(one == {"type": source["type"], "uid": source["uid"]} for one in used)
    assert all(
        'run=~"$run"' in expression
        for panel in panels
        for expression in [target["expr"] for target in panel["targets"]]
    )


def test_nothing_is_published_beyond_loopback() -> None:
    assert set(MONITOR) == {"exporter", *IMAGES}
    assert all(
        port.startswith("127.0.0.1:")
        for service in SERVICES.values()
        for port in service.get("ports", ())
    )
    for name, port in IMAGES.items():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", MONITOR[name]["image"]), (
            "the version is pinned"
        )
        assert [published.rsplit(":", 1)[1] for published in MONITOR[name]["ports"]] == [str(port)]
    assert MONITOR["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_what_is_mounted_exists() -> None:
    mounts = [
        mount for name in IMAGES for mount in MONITOR[name]["volumes"] if mount.startswith(".")
    ]
    assert len(mounts) == 4 and all((ROOT / mount.split(":")[0]).is_file() for mount in mounts)
    inside = {mount.split(":")[1] for mount in mounts}
    (provider,) = yaml.safe_load((MONITORING / "grafana/dashboards.yaml").read_text())["providers"]
    home = MONITOR["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in inside and home.startswith(provider["options"]["path"] + "/")


def test_prometheus_asks_the_exporter_and_grafana_asks_prometheus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They use the names of the services, the exporter's default port and its paths."""
    listening = []
    monkeypatch.setattr(
        "areal_lite.tools.report.exporter.exporter",
        lambda run_dirs, host, port: listening.append((host, port)) or _Ended(),
    )
    monkeypatch.setattr(
        "sys.argv",
        ["exporter", *re.sub(r"\$\{\w+:-(\w+)\}", r"\1", MONITOR["exporter"]["command"]).split()],
    )
    assert main() == 0
    ((host, port),) = listening
    runs, servers = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert host == "node", "not loopback: Prometheus runs in another container"
    assert runs["static_configs"] == [{"targets": [f"exporter:{port}"]}]
    assert servers["http_sd_configs"][0]["url"] == f"http://exporter:{port}/servers"
    (source,) = yaml.safe_load((MONITORING / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{IMAGES['prometheus']}"


class _Ended:
    server_address, server_port = ("127.0.0.1", 1), 1

    def serve_forever(self) -> None: ...


def test_settings_and_their_defaults_are_those_of_the_example() -> None:
    used = set(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == set(example.items())
