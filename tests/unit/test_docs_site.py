"""The site of the documentation: it has every page, and its figures and its example are right."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_lite.algo.advantages import grpo
from areal_lite.algo.losses import LossInputs, ppo_loss
from areal_lite.config import DataConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONCEPTS = (DOCS / "concepts.md").read_text()


def test_the_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert len(pages) == len(set(pages))
    assert {page for page in pages if (DOCS / page).exists()} == {p.name for p in DOCS.glob("*.md")}
    for page in pages:
        assert (DOCS / page).exists() or (ROOT / page).exists(), page
    results = (ROOT / "benchmarks" / "results").rglob("*.md")
    assert {str(page.relative_to(ROOT)) for page in results} <= set(pages)


def test_the_site_builds() -> None:
    """As docs/build.sh demands: each page that is linked is in the navigation, each link a file."""
    nav = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    waiting, seen = sorted(DOCS.glob("*.md")), set()
    while waiting:
        page = waiting.pop()
        seen.add(page)
        for link in re.findall(r"\]\(([^)#\s:]+)[)#]", page.read_text()):
            target = (page.parent / link).resolve()
            assert target.is_file(), f"{page.relative_to(ROOT)}: {link}"
            if target.suffix == ".md" and target not in seen:
                waiting.append(target)
    outside = {str(page.relative_to(ROOT)) for page in seen if page.parent != DOCS}
    assert outside <= nav


def test_nothing_comes_from_another_host() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "vendor/mermaid.min.js" in settings
    assert "://" not in settings


@pytest.mark.parametrize("name", ["versions.svg", "staleness.svg", "decoupled.svg", "prefixes.svg"])
def test_a_figure_is_what_its_script_draws(name: str) -> None:
    draw = runpy.run_path(str(DOCS / "figures" / "concepts.py"))["FIGURES"][name]
    assert (DOCS / "figures" / name).read_text() == draw()


def test_the_page_on_security_names_every_test_of_it() -> None:
    page = (DOCS / "security.md").read_text()
    tests = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert tests <= set(re.findall(r"tests/security/(\w+\.py)", page))


def test_the_code_of_the_first_run_makes_rows_and_rewards(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "first-run.md").read_text()
    reward, data = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    names: dict[str, Any] = {}
    exec(reward, names)
    assert names["digits"]("12345678", "") == 1.0 and names["digits"]("", "") == 0.0
    exec(data, {})
    rows = [json.loads(line) for line in Path("test.jsonl").read_text().splitlines()]
    assert rows[0] == {DataConfig.prompt_key: "500+500=", DataConfig.answer_key: "1000"}


def numbers(row: str) -> tuple[list[float], list[bool]]:
    """Return the numbers of a row of a table, and its yes and no."""
    cells = [cell.strip().replace("−", "-") for cell in row.strip("|").split("|")][1:]
    flags = [cell == "yes" for cell in cells if cell in ("yes", "no")]
    return [float(cell) for cell in cells if cell not in ("yes", "no")], flags


def loss(advantage: float, *probs: float, decoupled: bool) -> tuple[float, bool]:
    """Return the loss of one token of (behavior, proximal, current) probability; does it learn?"""
    behavior, prox, current = (torch.tensor([p]).log() for p in probs)
    current.requires_grad_()
    one = torch.tensor([advantage])
    inputs = LossInputs(current, prox, behavior, one, torch.tensor([True]))
    value = ppo_loss(inputs, eps_low=0.2, eps_high=0.2, decoupled=decoupled).loss
    value.backward()
    return value.item(), bool(current.grad)


def test_the_example_of_decoupled_ppo_is_what_the_loss_computes() -> None:
    rows = [numbers(row) for row in re.findall(r"^\| \w[\w ]* \| (?:−?1 \|.*)$", CONCEPTS, re.M)]
    assert len(rows) == 4
    totals = [0.0, 0.0]
    for (a, behavior, prox, theta, w, r, decoupled, naive), (learns, learns_naive) in rows:
        assert w == pytest.approx(min(prox / behavior, 5), abs=0.005)
        assert r == pytest.approx(theta / prox, abs=0.005)
        computed = loss(a, behavior, prox, theta, decoupled=True)
        assert computed == (pytest.approx(decoupled, abs=0.005), learns)
        assert loss(a, behavior, prox, theta, decoupled=False) == (
            pytest.approx(naive, abs=0.005),
            learns_naive,
        )
        totals = [totals[0] + decoupled / 4, totals[1] + naive / 4]
    stated = re.findall(r"is −([\d.]+) \(decoupled\) and −([\d.]+) \(naive\)", CONCEPTS)[0]
    assert [-float(x) for x in stated] == pytest.approx(totals)


def test_the_advantages_of_the_example_are_those_of_the_estimator() -> None:
    stated = [float(x.replace("−", "-")) for x in re.findall(r"advantage ([+−][\d.]+)", CONCEPTS)]
    rewards = [float(x) for x in re.findall(r"<br>reward (\d)", CONCEPTS)]
    computed = grpo(torch.tensor(rewards), torch.zeros(4, dtype=torch.long))
    assert computed.tolist() == pytest.approx(stated, abs=1e-4)
