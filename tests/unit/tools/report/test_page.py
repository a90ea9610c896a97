"""The page of a run: it is bounded, keeps secrets, and model output cannot act in it."""

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from areal_lite.config import load_config, save_config
from areal_lite.run_dir.metrics import append_event
from areal_lite.run_dir.store import Store
from areal_lite.tools.report.page import compare_page, run_page, write_page
from areal_lite.tools.report.rollouts import token_decoder, token_texts
from areal_lite.trajectory import Group
from tests.unit.tools.report.browser import BROWSER, Session, browse, load
from tests.unit.tools.report.recorded_run import unpack
from tests.unit.tools.report.synthetic_run import T0, hand_made, simulate, trajectory, write_group

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><!-- \u2028 & \x00"


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts and styles by id or tag."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.raw: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open:
            self.raw[self._open] = self.raw.get(self._open, "") + data

    @property
    def rollouts(self) -> list[dict]:
        return json.loads(zlib.decompress(base64.b64decode(self.raw["heavy"])))


def policy_of(page: Page) -> str:
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    (policy,) = [m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy"]
    return policy


def hostile_run(run_dir: Path) -> Path:
    """Make a run whose prompts, servers, tokens and settings are markup that acts."""
    config = hand_made(run_dir)
    model = run_dir / "model"
    model.mkdir()
    Tokenizer(WordLevel({HOSTILE: 0, "?": 1}, unk_token="?")).save(str(model / "tokenizer.json"))
    config.model, config.server.api_key = str(model), "sesame-open"
    config.rollout.workflow = HOSTILE.replace("\x00", "")
    save_config(config, run_dir)
    store = Store(run_dir / "trajectories.sqlite")
    bad = trajectory(3, 0, [(1, 30)], T0 + 6, T0 + 9)
    bad.server = bad.prompt_id = HOSTILE
    write_group(store, Group(group_id=3, prompt_id=HOSTILE, size=1, trajectories=[bad]), 1)
    store.close()
    append_event(run_dir, "proximal", {"step": 1, "group_id": 3, "prox": {"0": [-0.5] * 30}})
    append_event(run_dir, "evals", {"name": HOSTILE, "version": 2, "greedy": 0.5, "sampled": 0.5})
    return run_dir


def test_hostile_text_is_data_and_nothing_else(tmp_path: Path) -> None:
    text = run_page(hostile_run(tmp_path))
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    (group,) = [group for group in page.rollouts if group["group"] == 3]
    assert group["prompt"] == HOSTILE and group["samples"][0]["texts"][0] == HOSTILE
    assert json.loads(page.raw["data"])["windows"][0]["bars"]
    assert "sesame-open" not in text


def test_the_policy_names_exactly_the_page_s_own_style_and_script(tmp_path: Path) -> None:
    page = Page(run_page(hostile_run(tmp_path)))
    policy = policy_of(page)
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "connect-src 'self'" in policy_of(Page(run_page(tmp_path, follow=True)))
    assert not [
        a for tag, a in page.tags if tag in ("link", "iframe") or "src" in a or "style" in a
    ]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.raw["script"])


def test_importance_weights_are_the_ratio_of_the_two_policies(tmp_path: Path) -> None:
    page = Page(run_page(hostile_run(tmp_path)))
    samples = {group["group"]: group["samples"][0] for group in page.rollouts}
    assert samples[3]["weights"][:10] == [None] * 10
    assert samples[3]["weights"][10:] == pytest.approx([np.exp(-0.5 + 1)] * 30, rel=1e-3)
    assert samples[0]["weights"] is None


def test_tokens_past_the_bound_are_marked(tmp_path: Path) -> None:
    simulate(tmp_path, steps=8)
    config = load_config(tmp_path)
    config.buffer.max_staleness = 1
    save_config(config, tmp_path)
    marked = 0
    for group in Page(run_page(tmp_path)).rollouts:
        for sample in group["samples"]:
            late = {
                token
                for version, start, end in sample["segments"]
                for token in range(start, end)
                if group["step"] - 1 - version > 1
            }
            assert set(sample["overdue"]) == late
            marked += len(late)
    assert marked > 0


@pytest.mark.parametrize("steps", (0, 1))
def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, steps: int) -> None:
    config = hand_made(tmp_path, killed=True)
    if not steps:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "trajectories.sqlite").unlink()
        save_config(config, tmp_path)
    text = write_page(tmp_path).read_text()
    assert f"{steps} of 2 training steps" in text and "The run has not ended" in text


def test_charts_of_a_critic_and_a_reference_are_there_if_a_run_has_them(tmp_path: Path) -> None:
    def drawn(text: str) -> set[str]:
        return {a["data-chart"] for _, a in Page(text).tags if "data-chart" in a}

    for name in ("without", "with"):
        hand_made(tmp_path / name)
    path = tmp_path / "with" / "metrics.jsonl"
    values = [{"reference_kl": 0.5, "value_error": 0.2, "value_explained": None}]
    values += [{"reference_kl": 0.25, "value_error": 0.1, "value_explained": 0.75}]
    steps = [json.loads(line) | own for line, own in zip(path.read_text().splitlines(), values)]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    own = {"reference_kl", "value_error", "value_explained"}
    plain, page = (run_page(tmp_path / name) for name in ("without", "with"))
    assert drawn(page) == drawn(plain) | own and not drawn(plain) & own
    charts = json.loads(Page(page).raw["data"])["charts"]
    points = {name: charts[name]["series"][0]["y"] for name in own}
    assert points == {
        "reference_kl": [0.5, 0.25],
        "value_error": [0.2, 0.1],
        "value_explained": [0.75],
    }
    both = compare_page([tmp_path / "without", tmp_path / "with"])
    series = json.loads(Page(both).raw["data"])["charts"]["value_error"]["series"]
    assert own <= drawn(both) and [one["name"] for one in series] == ["with"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run directory"):
        write_page(tmp_path)


def test_the_size_of_a_page_does_not_grow_with_its_run(tmp_path: Path) -> None:
    sizes = []
    for steps in (20, 60):
        folder = tmp_path / str(steps)
        folder.mkdir()
        simulate(folder, steps=steps)
        sizes.append(len(run_page(folder)))
    assert sizes[1] < 1.3 * sizes[0]


def test_token_texts_join_to_the_text_and_wait_for_whole_characters() -> None:
    def decode(ids):  # a token is a byte; a decoder drops the first space of a text
        return bytes(ids).decode(errors="replace").removeprefix(" ")

    for text in ("plain", "a é ‖ 𝄞 z", " b  c"):
        ids = list(text.encode())
        texts = token_texts(ids, decode)
        assert len(texts) == len(ids) and "".join(texts) == decode(ids)
    assert token_texts(list("é".encode()), decode) == ["", "é"]
    assert "".join(token_texts([0xFF, 0x61], decode)) == "\ufffda"
    assert token_decoder(Path("nowhere"), None)([5, 7]) == "‹5›‹7›"


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_a_browser_draws_hostile_data_without_running_it(tmp_path: Path) -> None:
    page = write_page(hostile_run(tmp_path))

    async def use(session: Session) -> None:
        plots = await session.value("document.querySelectorAll('svg[role=img]').length")
        assert plots >= 10, "the charts that have data, and the timeline"
        for selector in ("[data-timeline] svg[role=img]", "[data-rollouts] [role=group][tabindex]"):
            groups = await session.value("document.querySelectorAll('.groups button').length")
            for number in range(groups):
                await session.value(
                    f"document.querySelectorAll('.groups button')[{number}].click()"
                )
                await session.value(f"document.querySelector('{selector}').focus()")
                for _ in range(3):
                    await session.press("ArrowRight")
                    assert await session.value("document.querySelectorAll('img').length") == 0
        assert HOSTILE[:9] in await session.value("document.body.textContent")
        assert await session.value("document.title") == tmp_path.name

    browse(page.as_uri(), tmp_path / "profile", use)


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_a_phone_in_the_dark_shows_a_run_within_its_width(tmp_path: Path) -> None:
    from matplotlib.image import imread

    page = write_page(unpack("async", tmp_path))
    picture = tmp_path / "page.png"
    dark = "--blink-settings=preferredColorScheme=0"
    shown = load(
        page, tmp_path / "profile", f"--screenshot={picture}", "--window-size=500,7000", dark
    )
    assert "CONSOLE" not in shown.stderr
    pixels = imread(picture)[..., :3]
    assert np.median(pixels) < 0.2
    edge = pixels[:, -4:].reshape(-1, 3)
    assert np.abs(edge - pixels[0, 0]).max() < 0.05, "something is wider than the page"


TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_the_keyboard_reads_every_kind_of_chart(tmp_path: Path) -> None:
    page = write_page(unpack("async", tmp_path))

    async def use(session: Session) -> None:
        async def read(selector: str, *keys: str) -> str:
            await session.value(f"document.querySelector(`{selector}`).focus()")
            for key in keys:
                await session.press(key)
            return await session.value(TIP)

        chart = "[data-chart={}] svg[role=img]"
        text = await read(chart.format("reward"), "ArrowRight", "ArrowRight")
        assert text.startswith("training step 1\nreward of each step: ")
        await session.press("Escape")
        assert await session.value(TIP) == ""
        assert "tokens" in await read(chart.format("staleness_histogram"), "ArrowRight")
        time = await read("[data-chart=step_time] svg[role=img]", "End")
        for part in ("waits for a batch: ", "trains: ", "pushes weights: "):
            assert part in time
        assert "left after a batch" in await read("[data-chart=queue] svg[role=img]", "End")
        assert (await read("[data-timeline] svg[role=img]", "End")).startswith("group ")
        token = await read("[data-rollouts] [role=group][tabindex]", "End")
        assert "log-prob" in token and "importance weight" in token and "in the loss" in token

    browse(page.as_uri(), tmp_path / "profile", use)


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_the_labels_of_an_axis_have_one_notation(tmp_path: Path) -> None:
    run = unpack("async", tmp_path)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, step in enumerate(steps):
        step["entropy"] = 0.0016 * number / len(steps)
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    page = write_page(run)

    async def use(session: Session) -> None:
        labels = "[data-chart=entropy] svg[role=img] text[text-anchor=end]"
        texts = await session.value(
            f"[...document.querySelectorAll('{labels}')].map((text) => text.textContent)"
        )
        assert texts == ["0", "0.0005", "0.001", "0.0015"]

    browse(page.as_uri(), tmp_path / "profile", use)


def test_settings_in_any_script_are_shown_as_they_are(tmp_path: Path) -> None:
    for name, prompt in (("a", "短く答えて"), ("b", "Sé bref.")):
        (tmp_path / name).mkdir()
        config = hand_made(tmp_path / name)
        config.data.system_prompt = prompt
        save_config(config, tmp_path / name)
    assert "system_prompt: 短く答えて" in run_page(tmp_path / "a")
    page = compare_page([tmp_path / "a", tmp_path / "b"])
    assert "短く答えて" in page and "Sé bref." in page
