"""Checkpoints of the real engine: six updates equal three, a checkpoint, and three more."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.run_dir.resume import damage
from areal_lite.tools.memory import activation_bytes_per_token, pushed_parameters, rank_parameters
from tests.ranks.processes import run_ranks

WORKER = Path(__file__).with_name("checkpoint_worker.py")
LAYOUTS = {
    "single": {},
    "dp2": {"data_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    return folder


def tell(folder: Path, name: str, layout: dict, stories: dict, status: int = 0) -> dict:
    """Tell `stories` on the processes of a layout, and return their results."""
    out = folder / f"{name}-ranks"
    results = out / "results.json"
    job = {
        "layout": layout,
        "model": str(folder / "model"),
        "stories": stories,
        "results": str(results),
    }
    run_ranks(WORKER, job, out, 2 if layout else 1, status=status)
    return json.loads(results.read_text()) if status == 0 else {}


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint, whole, by name."""
    state: dict = {}
    _load_state_dict(
        state, dcp.FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(folder, request) -> dict:
    """Run six updates with a checkpoint after three.

    The last three are repeated in new processes, and once more on one process.
    """
    name, layout = request.param, LAYOUTS[request.param]
    place = {kind: str(folder / f"{name}{kind}") for kind in ("", "-resumed", "-on-one")}
    first = tell(
        folder,
        f"{name}-1",
        layout,
        {"run": {"tell": "uninterrupted", "args": {"folder": place[""]}}},
    )["run"]
    again = {"tell": "resumed", "args": {"folder": place[""], "into": place["-resumed"]}}
    resumed = tell(folder, f"{name}-2", layout, {"run": again})["run"]
    again = {"tell": "resumed", "args": {"folder": place[""], "into": place["-on-one"]}}
    on_one = tell(folder, f"{name}-3", {}, {"run": again})["run"] if layout else resumed
    last = {
        kind: contents(Path(path) / "step-6")
        for kind, path in place.items()
        if layout or kind != "-on-one"
    }
    return first | {"resumed": resumed, "on_one": on_one, "last": last}


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run):
    assert run["unpublished"]  # nothing has the final name while the writer waits for the disk
    assert run["resumed"]["extra"] == {"step": 3, "note": "three updates"}
    assert run["resumed"]["second"] == run["second"]
    expected, got = run["last"][""], run["last"]["-resumed"]
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    moments = [value for name, value in expected.items() if "exp_avg" in name]
    assert len(moments) >= 2 and all(value.abs().max() > 0 for value in moments)


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_continues_on_one_process(run):
    for got, expected in zip(run["on_one"]["second"], run["second"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    expected, got = run["last"][""], run["last"].get("-on-one", run["last"]["-resumed"])
    assert expected.keys() == got.keys()
    for name in expected:
        torch.testing.assert_close(
            got[name],
            expected[name],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(scope="module")
def stories(folder) -> dict:
    """Tell all stories of one process."""
    bfloat16 = {"dtype": "bfloat16"}
    here = {name: str(folder / name) for name in ("bf16", "both", "retention", "rate")}
    return tell(
        folder,
        "stories",
        {},
        {
            "first": {
                "tell": "uninterrupted",
                "args": {"folder": here["bf16"]},
                "settings": bfloat16,
            },
            "second": {
                "tell": "resumed",
                "args": {"folder": here["bf16"], "into": here["bf16"] + "-resumed"},
                "settings": bfloat16,
            },
            "both": {"tell": "with_critic", "args": {"folder": here["both"]}},
            "alone": {"tell": "needs_critic", "args": {"folder": here["both"] + "-alone"}},
            "early": {"tell": "before_any_update", "args": {"folder": here["retention"]}},
            "rate": {
                "tell": "other_rate",
                "args": {"folder": here["bf16"]},
                "settings": {"lr": 4e-3, "lr_schedule": "constant"},
            },
            "offload": {"tell": "offloaded"},
            "measured": {"tell": "measured"},
            "measured-bfloat16": {"tell": "measured", "settings": bfloat16},
            "measured-full": {"tell": "measured", "settings": {"recompute": "full"}},
        },
    )


def test_bfloat16_resumes_bitwise_with_its_float32_masters(folder, stories):
    assert stories["second"]["second"] == stories["first"]["second"]
    state = contents(folder / "bf16" / "step-6")
    masters = [value for name, value in state.items() if ".optimizer.state.param." in name]
    assert masters and all(value.dtype == torch.float32 for value in masters)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters)


def test_policy_and_critic_are_one_checkpoint(stories):
    policy, critic = stories["both"]["expected"]
    assert policy != critic
    assert stories["both"]["got"] == [policy, critic]


def test_a_checkpoint_without_a_critic_is_refused_by_a_run_with_one(stories):
    assert "holds no critic" in stories["alone"]


def test_a_checkpoint_before_the_first_update(stories):
    early = stories["early"]
    assert early["again"] == early["first"] == early["plain"]


def test_the_newest_stay(stories):
    assert stories["early"]["left"] == ["step-20", "step-25"]


def test_the_schedule_keeps_its_place_and_takes_the_settings_of_the_run(stories):
    """The checkpoint has 3 updates of a warm-up of 4: 4, 5 and 6 follow, at the new rate."""
    assert [m["lr"] for m in stories["rate"]] == pytest.approx([4e-3, 4e-3, 4e-3])


def test_offloaded_state_comes_back(stories):
    assert stories["offload"]["offloaded_bytes"] == [0]
    assert stories["offload"]["got"] == stories["offload"]["expected"]


def kept_after_layers(hf, itemsize: int) -> int:
    """Return the bytes a token that the last norm keeps, and the head besides logits."""
    return hf.hidden_size * (2 * itemsize if itemsize == 4 else 8 + itemsize)


@pytest.mark.parametrize(
    ("name", "itemsize", "recompute"),
    [("", 4, "none"), ("-bfloat16", 2, "none"), ("-full", 4, "full")],
)
def test_planned_memory_is_needed(folder, stories, name, itemsize, recompute):
    got, hf = stories[f"measured{name}"], AutoConfig.from_pretrained(folder / "model")
    trainer = TrainerConfig(recompute=recompute, tokens_per_microbatch=got["tokens"])
    assert got["parameters"] == sum(rank_parameters(hf, trainer, 0))
    assert sum(got["buckets"]) == pushed_parameters(hf, trainer) * itemsize
    planned = got["tokens"] * activation_bytes_per_token(hf, trainer, itemsize, 0)
    if recompute == "full":  # one layer at a time is computed again after the forward pass
        planned -= (
            got["tokens"]
            * activation_bytes_per_token(hf, TrainerConfig(), itemsize, 0)
            / hf.num_hidden_layers
        )
    head = kept_after_layers(hf, itemsize)
    places = 56  # of a token in its sequence, its batch and the sampled tokens
    planned += got["tokens"] * (head + places)
    assert got["kept"] == pytest.approx(planned, rel=0.05)


def test_a_killed_save_leaves_the_previous_checkpoint(folder):
    place = folder / "killed"
    tell(
        folder, "killed", {}, {"run": {"tell": "killed", "args": {"folder": str(place)}}}, status=-9
    )
    assert {path.name for path in place.iterdir()} == {"step-3", ".step-6.partial"}
    result = tell(
        folder,
        "after",
        {},
        {
            "run": {
                "tell": "resumed",
                "args": {"folder": str(place), "into": str(place)},
                "settings": {"lr": 1e-3},
            }
        },
    )
    assert result["run"]["extra"] == {}
    assert {path.name for path in place.iterdir()} == {"step-3", "step-6"}


def test_ranks_agree(folder):
    """When one rank's loss is not finite, all skip; when one rank cannot write, all raise.

    A checkpoint is whole on rank 0's machine, also if no other rank sees that.
    """
    place = str(folder / "agree")
    stories = {
        "apart": {"tell": "apart", "args": {"folder": str(folder / "apart")}},
        "late": {"tell": "seen_late", "args": {"folder": str(folder / "late")}},
        "poison": {"tell": "poisoned"},
        "measured": {"tell": "measured"},
        "unwritable": {"tell": "unwritable", "args": {"folder": place}},
    }
    told = tell(folder, "agree", LAYOUTS["tp2"], stories)
    assert told["apart"]["left"] == ["step-3"]
    assert damage(folder / "apart" / "machine-0" / "step-3") == ""
    assert damage(folder / "late" / "step-1") == ""
    assert told["apart"]["step"] == 3
    assert told["apart"]["got"] == told["apart"]["expected"]
    assert told["poison"]["first"][0]["skipped"] == 0.0
    assert told["poison"]["bad"][0]["skipped"] == 1.0
    assert told["poison"]["same"]
    assert told["poison"]["next"][0]["skipped"] == 0.0
    hf = AutoConfig.from_pretrained(folder / "model")
    assert told["measured"]["parameters"] == sum(
        rank_parameters(hf, TrainerConfig(tensor_parallel=2), 0)
    )
    assert "step-2: this checkpoint could not be written" in told["unwritable"]
    assert "No such file" in told["unwritable"]
    assert not (Path(place) / "step-2").exists()
    assert (Path(place) / "step-1").is_dir()
