"""The plan of a run: parameters against transformers, memory by hand, what fits, `--dry-run`."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lite import cli
from areal_lite.config import LoraConfig, ServerConfig, TrainConfig, TrainerConfig
from areal_lite.data.model_folder import UNTRAINED
from areal_lite.megatron.architectures import ARCHITECTURES
from areal_lite.tools import memory
from areal_lite.tools.formatting import byte_size
from areal_lite.tools.memory import GIB, rank_memory, share_gpu, trainer_bytes
from areal_lite_quickstart.make_model import build_char_tokenizer
from tests.unit.launch.torch_allocator import Allocator, training_step

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def hf_config(architecture: str, **fields):
    sizes = SIZES | {"pad_token_id": None} | (EXPERTS if "moe" in architecture else {})
    if architecture == "glm4_moe":
        sizes["n_routed_experts"] = sizes.pop("num_experts")
    return AutoConfig.for_model(architecture, **(sizes | fields))


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_those_of_transformers(architecture, tied):
    hf = hf_config(architecture, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    biases = [x for name, x in model.named_buffers() if name.endswith(UNTRAINED)]
    counted = [*model.parameters(), *biases]
    assert memory.num_parameters(hf) == sum(p.numel() for p in counted)


def test_parameters_of_published_models():
    """As their safetensors indices count them."""
    llama = dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert (
        memory.num_parameters(AutoConfig.for_model("llama", tie_word_embeddings=False, **llama))
        == 8_030_261_248
    )
    qwen = dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    assert (
        memory.num_parameters(AutoConfig.for_model("qwen2", tie_word_embeddings=False, **qwen))
        == 7_615_616_512
    )


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
        {"pipeline_parallel": 4},
    ],
)
def test_stages_add_up_to_the_model(layout):
    hf = hf_config("qwen3_moe", tie_word_embeddings=False)
    trainer = TrainerConfig(**layout)
    stages = [
        sum(memory.rank_parameters(hf, trainer, stage))
        for stage in range(trainer.pipeline_parallel)
    ]
    assert sum(stages) == memory.num_parameters(hf)


def test_a_rank_has_its_share():
    hf = hf_config("qwen3_moe", tie_word_embeddings=False)
    whole = memory.rank_parameters(hf, TrainerConfig(), 0)
    # Whole on every rank.
    norms = (1 + 2 * 4) * 64 + 2 * 4 * memory.head_dim(hf)
    routers = 4 * 4 * 64
    dense, experts = memory.rank_parameters(
        hf, TrainerConfig(tensor_parallel=2, data_parallel=2, expert_parallel=2), 0
    )
    # A rank has 49 rows of embedding and output layer, which have 97 rows each.
    assert dense == (whole[0] - norms - routers + 2 * 64) // 2 + norms + routers
    assert experts == whole[1] // 2


def test_states_of_a_rank():
    hf = hf_config("qwen3")
    n = memory.num_parameters(hf)
    half = memory.rank_memory(hf, TrainerConfig(data_parallel=4), 2, 0)
    assert (half.weights, half.gradients, half.masters, half.moments) == (
        2 * n,
        4 * n,
        4 * (n // 4),
        8 * (n // 4),
    )
    full = memory.rank_memory(hf, TrainerConfig(), 4, 0)
    assert (full.weights, full.gradients, full.masters, full.moments) == (4 * n, 4 * n, 0, 8 * n)
    assert full.total == 16 * n + full.activations + full.head


def test_sgd_has_no_moments_and_all_its_masters():
    hf = hf_config("qwen3")
    n = memory.num_parameters(hf)
    trainer = TrainerConfig(optimizer="sgd", data_parallel=4)
    half, full = (memory.rank_memory(hf, trainer, itemsize, 0) for itemsize in (2, 4))
    assert (half.gradients, half.masters, half.moments) == (4 * n, 4 * n, 0)
    assert (full.gradients, full.masters, full.moments) == (4 * n, 0, 0)


def test_muon_has_one_moment_of_a_matrix_and_all_its_masters():
    hf = hf_config("qwen3", tie_word_embeddings=False)
    n = memory.num_parameters(hf)
    norms = (1 + 2 * 4) * 64 + 2 * 4 * memory.head_dim(hf)
    others = 2 * 97 * 64 + norms
    trainer = TrainerConfig(optimizer="muon", data_parallel=4)
    half = memory.rank_memory(hf, trainer, 2, 0)
    assert (half.masters, half.moments) == (4 * n, 4 * (n - others) + 8 * others)


def test_recomputing_and_more_ranks_need_less():
    hf = hf_config("qwen3")

    def activations(**layout):
        return memory.rank_memory(hf, TrainerConfig(**layout), 2, 0).activations

    assert activations(recompute="full") < activations() / 2
    assert activations(context_parallel=2) == activations() / 2
    assert activations(tensor_parallel=2) == activations() / 2
    assert activations(tokens_per_microbatch=2048) == activations() / 4
    assert activations(pipeline_parallel=2) == activations()  # half of the layers, two microbatches


def test_a_key_and_a_value_in_each_layer_of_each_head():
    hf = hf_config("qwen3")
    assert memory.kv_bytes_per_token(hf, 2, 1) == 2 * 4 * 2 * memory.head_dim(hf) * 2
    assert memory.kv_bytes_per_token(hf, 2, 2) == memory.kv_bytes_per_token(hf, 2, 1) / 2
    assert memory.kv_bytes_per_token(hf, 2, 4) == memory.kv_bytes_per_token(hf, 2, 2)


def test_a_push_has_every_parameter_once():
    hf = hf_config("qwen3_moe")
    assert memory.pushed_parameters(hf, TrainerConfig()) == memory.num_parameters(hf)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    hf_config("qwen3").save_pretrained(folder)
    build_char_tokenizer().save_pretrained(folder)
    return folder


def test_memory_of_adapters_by_hand():
    """Rank 4 on the output of attention, 64 x 64, and on the fused gate and up, 192 x 64."""
    hf = hf_config("qwen2")
    lora = LoraConfig(rank=4, targets=["proj", "fc1"])
    trained = 4 * (4 * (64 + 64) + 4 * (192 + 64))
    whole = memory.rank_memory(hf, TrainerConfig(lora=lora, data_parallel=2), 2, 0)
    assert memory.adapter_parameters(hf, TrainerConfig(lora=lora)) == trained
    assert whole.weights == 2 * (memory.num_parameters(hf) + trained)
    assert whole.gradients == 4 * trained
    assert (whole.masters, whole.moments) == (4 * trained // 2, 8 * trained // 2)
    split = TrainerConfig(lora=lora, tensor_parallel=2, pipeline_parallel=2)
    each = 2 * (4 * (64 + 32) + 4 * (64 + 96))
    assert memory.rank_memory(hf, split, 2, 0).gradients == 4 * each


def test_a_dry_run_counts_adapters_and_no_memory_for_their_base(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}", "algo.kl.coef=0.1"]
    base = ["algo.reference=${model}", "trainer.lora.rank=2", "trainer.lora.targets=[proj]"]
    assert cli.main(["train", "--dry-run", "+task=addition", *where, *base]) == 0
    shown = capsys.readouterr().out
    trained = memory.adapter_parameters(
        hf_config("qwen3"), TrainerConfig(lora=LoraConfig(rank=2, targets=["proj"]))
    )
    assert f"adapters of rank 2 on proj: only their {trained:,} parameters are trained" in shown
    (gradients,) = [line for line in shown.splitlines() if line.startswith("  gradients")]
    assert byte_size(4 * trained) in gradients
    assert "  reference" not in shown


def test_a_dry_run_shows_the_plan_and_leaves_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overrides = [
        "+task=addition",
        "trainer.data_parallel=2",
        "trainer.minibatches=2",
        "trainer.steps=10",
        "trainer.batch_groups=8",
        "trainer.dtype=bfloat16",
    ]
    assert (
        cli.main(
            ["train", "--dry-run", f"model={model}", f"run_dir={tmp_path / 'run'}", *overrides]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert f"{memory.num_parameters(hf_config('qwen3')):,} parameters" in shown
    assert "trainer: 2 ranks" in shown and "1 reward worker," in shown
    assert "objective: ppo, decoupled, advantages grpo" in shown
    assert "reward: areal_lite_quickstart.addition:addition_reward" in shown
    assert "workflow: areal_lite.rollout.episode:single_turn" in shown
    assert "8 groups x 8 = 64 sequences" in shown
    assert "10 steps: 20 updates, 640 sequences" in shown
    saving = 36 * memory.num_parameters(hf_config("qwen3"))
    (line,) = [line for line in shown.splitlines() if line.startswith("  saving")]
    assert byte_size(saving) in line and "host memory" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


IDLE = "algo.eps_low and algo.eps_high never act"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], IDLE),
        (["trainer.minibatches=2"], None),
        (["algo.decoupled=false", "schedule=one_step"], None),
        (
            ["algo=olmorl", "trainer.minibatches=2", "buffer.max_staleness=16"],
            "staleness=16 is more",
        ),
        (["algo.loss=examples.recipes.stale:loss", "buffer.max_staleness=64"], None),
    ],
)
def test_a_dry_run_cautions_against_settings_that_cannot_work(
    model, tmp_path, capsys, monkeypatch, overrides, message
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", "--dry-run", "+task=addition", *where, *overrides]) == 0
    shown = capsys.readouterr()
    assert (IDLE in shown.out) == (message == IDLE), "it is a line of the plan, not a caution"
    cautions = shown.err.splitlines()
    assert len(cautions) == (message not in (None, IDLE))
    assert all(line.startswith("caution: ") and message in line for line in cautions)


@pytest.mark.parametrize(
    ("override", "status", "message"),
    [
        ("trainer.minibatches=5", 2, "trainer.minibatches=5"),
        ("trainer.pipeline_parallel=3", 2, "4 layers cannot be split"),
        ("trainer.tensor_parallel=4", 2, "num_key_value_heads=2"),
        ("trainer.device=cuda", 2, "trainer.device=cuda"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(model, capsys, monkeypatch, override, status, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["train", "--dry-run", "+task=addition", f"model={model}", override]) == status
    assert message in capsys.readouterr().err


def test_only_a_training_run_has_a_plan(capsys):
    assert cli.main(["eval", "--dry-run"]) == 2
    assert "--dry-run" in capsys.readouterr().err


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

    Their MLP keeps two more tensors, each of their norms two bytes less of a hidden value, and none
    has a copy of attention's output.
    """
    trainer = TrainerConfig(**layout)
    layers = 1 if trainer.recompute == "full" else hf.num_hidden_layers
    width = hf.intermediate_size // trainer.tensor_parallel
    more = 2 * 2 * width * trainer.tokens_per_microbatch * layers
    less = (2 * 2 + 2) * hf.hidden_size * trainer.tokens_per_microbatch * layers
    more -= less / trainer.tensor_parallel
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
    build_char_tokenizer().save_pretrained(tmp_path)
    hf.save_pretrained(tmp_path)
    where = [f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    config = cli.checked_config("train", ["+experiment=[gsm8k,one_gpu]", *where])
    plans = [share_gpu(config, hf, size * GIB) for size in (24, 80, 140)]
    assert [not plan.missing for plan in plans] == fits


def test_what_fits_in_turn():
    """A 7B model fits that has no room beside a server."""
    args = {"mem_fraction_static": 0.5, "enable_memory_saver": True}
    config = TrainConfig(model="m", server=ServerConfig(args=args))
    config.trainer = TrainerConfig(data_parallel=8, recompute="full", tokens_per_microbatch=8192)
    plan = share_gpu(config, QWEN_7B, 80 * GIB)
    assert not plan.missing and plan.trainer > 0.5 * 80 * GIB
    states = rank_memory(QWEN_7B, config.trainer, 2, 0, gpu=True)
    kept = states.weights + states.masters
    assert kept < plan.rest - (80 * GIB - plan.trainer_share) < 1.1 * kept + GIB
    config.server.args["mem_fraction_static"] = 0.8
    assert share_gpu(config, QWEN_7B, 80 * GIB).missing == ["the rest"]


def test_a_cache_without_room_for_a_sequence_does_not_fit():
    server = ServerConfig(args={"mem_fraction_static": 0.2, "max_total_tokens": 1000})
    config = TrainConfig(model="m", server=server, trainer=TrainerConfig(gpu_memory_fraction=0.6))
    assert share_gpu(config, QWEN3_0_6B, 140 * GIB).missing == ["one sequence in the KV cache"]
    config.server.args["max_total_tokens"] = None
    assert not share_gpu(config, QWEN3_0_6B, 140 * GIB).missing


def test_the_dry_run_shows_what_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    build_char_tokenizer().save_pretrained(tmp_path)
    QWEN_1_5B.save_pretrained(tmp_path)
    where = [f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", "--dry-run", "+experiment=[gsm8k,one_gpu]", *where]) == 0
    shown = capsys.readouterr().out.partition("on one GPU")[2].splitlines()[1:4]
    assert [line.split(".")[0].strip() for line in shown] == ["24", "80", "140"]
    assert shown[0].endswith("no room for the trainer") and shown[1].endswith("fits")
