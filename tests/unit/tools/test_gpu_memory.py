"""The memory of GPUs: known sizes, torch's allocator, and what fits into which GPU."""

import pytest
from transformers import AutoConfig

from areal_lite import cli
from areal_lite.config import ServerConfig, TrainConfig, TrainerConfig
from areal_lite.quickstart.char_tokenizer import build_char_tokenizer
from areal_lite.tools import memory
from areal_lite.tools.gpu_memory import GIB, share_gpu, trainer_bytes
from tests.unit.launch.torch_allocator import Allocator, training_step

QWEN_1_5B = AutoConfig.for_model(
    "qwen2",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
QWEN_7B = AutoConfig.for_model(
    "qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
RHO_1B = AutoConfig.for_model(
    "llama",
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
QWEN3_0_6B = AutoConfig.for_model(
    "qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    "hf, layout, gib",
    [
        (QWEN_1_5B, {"data_parallel": 2, "tokens_per_microbatch": 10240}, 52.5),
        (
            QWEN_1_5B,
            {"data_parallel": 32, "tokens_per_microbatch": 32768, "recompute": "full"},
            17.5,
        ),
        (
            QWEN_7B,
            {
                "tensor_parallel": 4,
                "sequence_parallel": True,
                "data_parallel": 2,
                "tokens_per_microbatch": 18432,
                "recompute": "full",
            },
            23.9,
        ),
        (RHO_1B, {"tokens_per_microbatch": 16384}, 53.5),
    ],
)
def test_memory_of_the_experiments(hf, layout, gib):
    """Numbers worked out by hand for other layers, in the general formula.

    Their MLP keeps two more tensors, and each of their norms two bytes less of a hidden value.
    """
    trainer = TrainerConfig(**layout)
    layers = 1 if trainer.recompute == "full" else hf.num_hidden_layers
    width = hf.intermediate_size // trainer.tensor_parallel
    more = 2 * 2 * width * trainer.tokens_per_microbatch * layers
    norms = 2 * 2 * hf.hidden_size * trainer.tokens_per_microbatch * layers
    more -= norms / (trainer.tensor_parallel if trainer.sequence_parallel else 1)
    planned = memory.rank_memory(hf, trainer, 2, 0).total
    assert (planned + more) / GIB == pytest.approx(gib, abs=0.06)


def test_activations_of_a_layer_on_a_gpu():
    """12 KiB of norms, 10.5 KiB of attention, and 52.5 KiB of MLP for each token."""
    per_token = memory.layer_activations(QWEN_1_5B, TrainerConfig(), 2, gpu=True)
    assert per_token / 1024 == pytest.approx(75, abs=0.1)


@pytest.mark.parametrize(
    "sizes, reserved_mib",
    [
        ([1], 2),
        ([2**20, 2**20], 2),  # both fill one small segment
        ([2**20 + 1], 20),
        ([5 * 2**20] * 4, 20),
        ([10 * 2**20], 10),
        ([11 * 2**20], 12),
        ([513] * 2048, 2),
        ([513] * 2049, 4),
    ],
)
def test_the_double_of_the_allocator_follows_torchs_rules(sizes, reserved_mib):
    allocator = Allocator()
    blocks = [allocator.take(size) for size in sizes]
    assert allocator.reserved == reserved_mib * 2**20
    for block in blocks[::2] + blocks[1::2]:
        allocator.give(block)
    allocator.take(max(sizes))
    assert allocator.reserved == reserved_mib * 2**20


@pytest.mark.parametrize(
    "hf, recompute, tokens",
    [(QWEN3_0_6B, "full", 8192), (QWEN_1_5B, "none", 8192), (RHO_1B, "none", 2048)],
)
def test_the_plan_is_just_above_what_torch_holds(hf, recompute, tokens):
    config = TrainConfig(
        model="m", trainer=TrainerConfig(recompute=recompute, tokens_per_microbatch=tokens)
    )
    config.rollout.max_new_tokens = 100
    sizes = [size for _, size in memory.parameter_sizes(hf)]
    held = training_step(sizes, hf, tokens, recompute == "full")
    assert 0.92 * trainer_bytes(config, hf) < held < trainer_bytes(config, hf)


@pytest.mark.parametrize(
    "hf, fits",
    [
        (QWEN3_0_6B, [True, True, True]),
        (QWEN_1_5B, [False, True, True]),
        (QWEN_7B, [False, False, False]),
    ],
)
def test_what_fits_into_one_gpu(hf, fits, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "tokenizer.json").write_text("{}")
    hf.save_pretrained(tmp_path)
    where = [f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    config = cli.checked_config("train", ["+experiment=[gsm8k,one_gpu]", *where])
    plans = [share_gpu(config, hf, size * GIB) for size in (24, 80, 140)]
    assert [not plan.missing for plan in plans] == fits


def test_a_cache_without_room_for_a_sequence_does_not_fit():
    server = ServerConfig(mem_fraction=0.2, max_total_tokens=1000)
    config = TrainConfig(model="m", server=server, trainer=TrainerConfig(gpu_memory_fraction=0.6))
    assert share_gpu(config, QWEN3_0_6B, 140 * GIB).missing == ["one sequence in the KV cache"]


def test_the_dry_run_shows_what_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "tokenizer.json").write_text("{}")
    QWEN_1_5B.save_pretrained(tmp_path)
    where = [f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", "--dry-run", "+experiment=[gsm8k,one_gpu]", *where]) == 0
    shown = capsys.readouterr().out.partition("on one GPU")[2].splitlines()[1:4]
    assert [line.split(".")[0].strip() for line in shown] == ["24", "80", "140"]
    assert shown[0].endswith("no room for the trainer") and shown[1].endswith("fits")


def test_the_dry_run_says_that_experts_are_slow_on_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    build_char_tokenizer().save_pretrained(tmp_path)
    AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=32,
    ).save_pretrained(tmp_path)
    assert cli.main(["train", "--dry-run", f"model={tmp_path}", "data.source=addition"]) == 0
    assert "on a GPU the trainer computes one expert after the other" in capsys.readouterr().out
