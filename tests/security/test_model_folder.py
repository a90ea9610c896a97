"""A damaged checkpoint folder is refused in one line with the file, before anything starts."""

import json
import math
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lite.data.model_folder import MODEL_TYPES, check_model_folder, check_weights
from areal_lite.data.tokenizer import Tokenizer
from areal_lite_quickstart import make_model
from areal_lite_quickstart.command import EXPERTS, MakeModelConfig

TINY = dict(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def make(folder: Path, architecture: str = "qwen3") -> Path:
    tie = architecture not in ("qwen3_moe", "qwen3_next", "glm4_moe", "gpt_oss", "deepseek_v3")
    make_model.run(
        MakeModelConfig(out=str(folder), architecture=architecture, tie_embeddings=tie, **TINY)
    )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def refusal(model: Path) -> str:
    with pytest.raises(ValueError) as error:
        check_model_folder(model)
    message = str(error.value)
    assert "\n" not in message and str(model) in message
    return message


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_every_architecture_passes_and_a_wrong_size_does_not(
    architecture: str, tmp_path: Path
) -> None:
    from areal_lite.megatron.architectures import ARCHITECTURES

    assert sorted(ARCHITECTURES) == sorted(MODEL_TYPES)
    model = make(tmp_path / "model", architecture)
    check_model_folder(model)
    config = json.loads((model / "config.json").read_text())
    mixture = architecture in EXPERTS and architecture != "gpt_oss"
    width = "moe_intermediate_size" if mixture else "intermediate_size"
    heads = "num_attention_heads" if architecture == "deepseek_v3" else "num_key_value_heads"
    for key in ("vocab_size", "hidden_size", heads, width):
        (model / "config.json").write_text(json.dumps(config | {key: config[key] * 2}))
        assert "but config.json implies" in refusal(model)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_odd_values_in_a_config_are_refused_in_one_line(architecture: str, tmp_path: Path) -> None:
    """Or they are not looked at."""
    model = make(tmp_path / "model", architecture)
    file = model / "config.json"
    config = json.loads(file.read_text())
    for key in config.keys() - {"model_type"}:
        for value in (5, -1, 0.5, "x", [1], {"a": 1}, True, None):
            file.write_text(json.dumps(config | {key: value}))
            try:
                check_weights(model)
            except ValueError as error:
                assert "\n" not in str(error) and str(model) in str(error)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (file, content)
        for file in (
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        )
        for content in (b"", b"nope", b"[]", b"null", b"\xff", b'{"a": ', b"[" * 100_000)
    ],
)
def test_json_that_is_damaged(file: str, content: bytes, model: Path) -> None:
    (model / file).write_bytes(content)
    assert file in refusal(model)


@pytest.mark.parametrize("eos", ['"x"', "99999999999999", "-1", "true", "1.5", "[1, 98]", "[[1]]"])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_outside_the_vocabulary(file: str, eos: str, model: Path) -> None:
    content = json.loads((model / file).read_text()) | {"eos_token_id": json.loads(eos)}
    (model / "generation_config.json").unlink()
    (model / file).write_text(json.dumps(content))
    assert f"{file}: eos_token_id" in refusal(model)


@pytest.mark.parametrize("template", [5, {}, [5], [{"name": "default"}]])
def test_chat_templates_of_another_type(template: object, model: Path) -> None:
    file = model / "tokenizer_config.json"
    (model / "chat_template.jinja").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert "chat_template" in refusal(model)
    (model / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja" in refusal(model)


@pytest.mark.parametrize("damage", ["empty", "header", "truncated", "garbage", "missing"])
def test_weights_that_are_damaged(damage: str, model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    contents = {
        "empty": b"",
        "header": content[:100],
        "truncated": content[:-1],
        "garbage": b"\xff" * len(content),
    }
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(contents[damage])
    assert "safetensors" in refusal(model)


def test_shapes_and_dtypes_are_those_of_the_configuration(model: Path) -> None:
    file = model / "model.safetensors"
    good = load_file(file)
    wrong = {
        "shape [16, 8]": good[Q_PROJ][:, :8].contiguous(),
        "shape []": torch.zeros(()),
        "dtype I64": good[Q_PROJ].long(),
    }
    for complaint, tensor in wrong.items():
        save_file(good | {Q_PROJ: tensor}, file)
        assert f"{Q_PROJ} has the {complaint}" in refusal(model)
    save_file(good | {Q_PROJ: good[Q_PROJ].bfloat16()}, file)
    check_model_folder(model)
    del good["model.layers.1.input_layernorm.weight"]
    save_file(good, file)
    assert "no tensor model.layers.1.input_layernorm.weight" in refusal(model)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_every_tensor_is_there_and_no_other(architecture: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", architecture)
    file = model / "model.safetensors"
    good = load_file(file)
    for name in good:
        save_file({other: good[other] for other in good if other != name}, file)
        assert f"no tensor {name}" in refusal(model)
    save_file(good | {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}, file)
    assert "has no tensor model.layers.2.mlp.up_proj.weight;" in refusal(model)


def test_a_layer_that_predicts_later_tokens_is_left_alone(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "glm4_moe")
    file, path = model / "model.safetensors", model / "config.json"
    good, config = load_file(file), json.loads(path.read_text())
    save_file(good | {"model.layers.2.eh_proj.weight": torch.zeros(1)}, file)
    assert "has no tensor model.layers.2.eh_proj.weight;" in refusal(model)
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    check_model_folder(model)
    save_file(good | {"model.layers.3.eh_proj.weight": torch.zeros(1)}, file)
    assert "has no tensor model.layers.3.eh_proj.weight;" in refusal(model)


@pytest.mark.parametrize(
    ("architecture", "fields", "remedy"),
    [
        ("olmo3", {"rope_parameters": {"rope_theta": 5e5}}, "write rope_theta and rope_scaling"),
        (
            "phi3",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "write partial_rotary_factor beside",
        ),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "write partial_rotary_factor beside",
        ),
    ],
)
def test_rotations_stand_where_sglang_reads_them(
    architecture: str, fields: dict, remedy: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "model", architecture)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    assert remedy in refusal(model)


def test_a_part_of_a_head_stands_where_sglang_reads_it(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "phi3")
    config = json.loads((model / "config.json").read_text())
    part = {"partial_rotary_factor": 0.5}
    rope = config["rope_parameters"] | part
    (model / "config.json").write_text(json.dumps(config | part | {"rope_parameters": rope}))
    check_model_folder(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"full_attention_interval": None},
        {"full_attention_interval": "2"},
        {"full_attention_interval": 1},
        {"layer_types": ["full_attention", "linear_attention"]},
    ],
)
def test_layers_with_attention_are_those_that_sglang_assumes(fields: dict, tmp_path: Path) -> None:
    model = make(tmp_path / "model", "qwen3_5_text")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    assert "write how often a layer has full attention" in refusal(model)


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("deepseek_v3", "moe_layer_freq"),
        ("deepseek_v3", "topk_method"),
        ("gpt_oss", "swiglu_limit"),
    ],
)
def test_what_sglang_reads_of_mixtures_is_there(
    architecture: str, field: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "model", architecture)
    config = json.loads((model / "config.json").read_text())
    del config[field]
    (model / "config.json").write_text(json.dumps(config))
    assert field in refusal(model)


def test_weights_that_predict_several_tokens_are_left_alone(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "qwen3_next")
    file = model / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(16, 32)}, file)
    check_model_folder(model)


def test_one_set_of_files_is_the_checkpoint(model: Path) -> None:
    """SGLang reads every safetensors file without an index; transformers prefers a single one."""
    shutil.copy(model / "model.safetensors", model / "zz_backup.safetensors")
    assert "zz_backup.safetensors is not part of the checkpoint" in refusal(model)
    (model / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(model)
    names = load_file(model / "zz_backup.safetensors")
    index = {"weight_map": dict.fromkeys(names, "zz_backup.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(model)
    shutil.copy(model / "zz_backup.safetensors", model / "other.safetensors")
    check_model_folder(model)  # nobody reads it
    shutil.copy(model / "zz_backup.safetensors", model / "model.safetensors")
    assert "model.safetensors is not part of the checkpoint" in refusal(model)


def test_a_tied_head_is_the_embedding(model: Path) -> None:
    file = model / "model.safetensors"
    good = load_file(file)
    head = good["model.embed_tokens.weight"].clone()
    save_file(good | {"lm_head.weight": head}, file)
    check_model_folder(model)
    head[0, 0] += 1
    save_file(good | {"lm_head.weight": head}, file)
    assert "lm_head.weight is not model.embed_tokens.weight" in refusal(model)


@pytest.mark.parametrize("size", ["x", 0, -1, 1.5, True, [16]])
def test_sizes_are_positive_integers(size: object, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": size}))
    assert "config.json: hidden_size=" in refusal(model)


def test_shards_that_the_index_names(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = ["model-1.safetensors", "model-2.safetensors"]
    shards = dict(zip(names, [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]))
    for name, shard in shards.items():
        save_file(shard, model / name)
    index = model / "model.safetensors.index.json"
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_model_folder(model)
    (model / names[1]).unlink()
    assert f"should be in {names[1]}, which is not there" in refusal(model)
    for damaged in ("[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}'):
        index.write_text(damaged)
        assert index.name in refusal(model)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_pass_or_are_refused(seed: int, made: Path, tmp_path: Path) -> None:
    generator = random.Random(seed)
    for number in range(100):
        model = Path(shutil.copytree(made, tmp_path / str(number)))
        file = generator.choice(sorted(model.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(min(len(content), 3000))
            content[at : at + generator.randint(0, 3)] = generator.choice(
                [b"", b"\xff", b"[", b"{", b"null", b"-1", b"9" * 30, b'"', b"\0"]
            )
        file.write_bytes(content)
        try:
            check_model_folder(model)
        except ValueError as error:
            assert str(model) in str(error) and "\n" not in str(error), file


def test_what_is_no_file_is_refused_and_not_opened(model: Path) -> None:
    """A pipe blocks for ever whoever opens it, and SGLang reads all that ends in .safetensors."""
    os.mkfifo(model / "extra.safetensors")
    assert "extra.safetensors is not a file" in refusal(model)
    (model / "extra.safetensors").unlink()
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "model.safetensors is not a file" in refusal(model)


@pytest.mark.parametrize("kind", [["qwen3"], None, 3, {"a": 1}])
def test_a_model_type_is_a_text(kind: object, model: Path) -> None:
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"model_type": kind}))
    assert "config.json: model_type=" in refusal(model)


@pytest.mark.parametrize(
    ("architecture", "key"), [("qwen3", "num_hidden_layers"), ("qwen3_moe", "num_experts")]
)
def test_sizes_that_no_memory_holds(architecture: str, key: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", architecture)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {key: 10**12}))
    began = time.monotonic()
    assert "no tensor model.layers." in refusal(model)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("key", ["normalizer", "pre_tokenizer", "added_tokens"])
def test_an_older_tokenizer_lacks_what_it_does_not_use(key: str, model: Path) -> None:
    settings = json.loads((model / "tokenizer.json").read_text())
    bound = Tokenizer(model).characters_per_token
    del settings[key]
    (model / "tokenizer.json").write_text(json.dumps(settings))
    check_model_folder(model)
    assert Tokenizer(model).characters_per_token <= bound


def test_a_tokenizer_whose_model_has_no_name_has_no_bound(model: Path) -> None:
    settings = json.loads((model / "tokenizer.json").read_text())
    del settings["model"]["type"]
    (model / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(model).characters_per_token == math.inf
