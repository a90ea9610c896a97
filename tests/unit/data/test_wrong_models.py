"""Wrong model folders of every kind: `areal-lite train` trains them rightly or starts nothing.

A refusal is one line with the file or the key, the tensor, and what to do.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lite import cli
from areal_lite.data import model_folder
from tests.security.test_model_folder import Q_PROJ, make

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARDS = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
Change = Callable[[Path], None]


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def tensors(change_them: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        change_them(found)
        save_file(found, folder / SINGLE)

    return change


def replaced(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda found: found.update({name: new(found[name])}))


def everything(new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda found: found.update({name: new(x) for name, x in found.items()}))


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[-1] = value
        return x

    return fill


def shards(change_them: Callable[[Path, dict[str, str]], Any] = lambda folder, index: None):
    """Write the checkpoint as two files and their index, then change them."""

    def change(folder: Path) -> None:
        found = sorted(load_file(folder / SINGLE).items())
        (folder / SINGLE).unlink()
        index = {}
        for file, part in zip(SHARDS, (found[:7], found[7:]), strict=True):
            save_file(dict(part), folder / file)
            index |= dict.fromkeys(dict(part), file)
        change_them(folder, index)
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))

    return change


def also_in_the_second(folder: Path, index: dict[str, str]) -> None:
    first, second = (load_file(folder / file) for file in SHARDS)
    save_file(second | {EMBEDDING: first.get(EMBEDDING, second.get(EMBEDDING))}, folder / SHARDS[1])
    save_file(first | {EMBEDDING: first.get(EMBEDDING, second.get(EMBEDDING))}, folder / SHARDS[0])
    index[EMBEDDING] = SHARDS[0]


def cut(file: str, size: int) -> Change:
    def change(folder: Path) -> None:
        with open(folder / file, "rb+") as opened:
            opened.truncate((folder / file).stat().st_size - size)

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def quantized(method: str, **fields: Any) -> Change:
    return config(quantization_config={"quant_method": method} | fields)


def packed(found: dict[str, torch.Tensor]) -> None:
    """Write a projection as GPTQ and AWQ do."""
    rows, columns = found.pop(Q_PROJ).shape
    stem = Q_PROJ.removesuffix("weight")
    found[stem + "qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
    found[stem + "scales"] = torch.ones(1, rows, dtype=torch.float16)


TO_EIGHT_BITS = replaced(Q_PROJ, lambda x: x.to(torch.float8_e4m3fn))
SAFETENSORS = "copy the checkpoint again"

# What is wrong -> how to make it, and what the refusal says, in this order.
REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "an unknown architecture": (
        config(model_type="mamba"),
        ("config.json", "'mamba'", "use one of qwen2, qwen3"),
    ),
    "no architecture": (config(model_type=None), ("config.json", "model_type=None")),
    "a vision part": (
        config(model_type="qwen2_5_vl", vision_config={"depth": 2}),
        ("'qwen2_5_vl'", "vision part", "save its text model"),
    ),
    "fp8": (
        both(quantized("fp8"), TO_EIGHT_BITS),
        ("config.json", "quantization_config", "fp8", "use the checkpoint in bfloat16"),
    ),
    "fp8 without a word": (
        TO_EIGHT_BITS,
        (SINGLE, Q_PROJ, "F8_E4M3", "use a checkpoint in floating point"),
    ),
    "awq": (
        both(quantized("awq", bits=4), tensors(packed)),
        ("config.json", "quantization_config", "awq", "use the checkpoint in bfloat16"),
    ),
    "gptq": (
        both(quantized("gptq", bits=4), tensors(packed)),
        ("config.json", "quantization_config", "gptq", "use the checkpoint in bfloat16"),
    ),
    "bitsandbytes": (
        quantized("bitsandbytes", load_in_4bit=True),
        ("config.json", "quantization_config", "bitsandbytes", "use the checkpoint in bfloat16"),
    ),
    "packed without a word": (tensors(packed), (Q_PROJ, SAFETENSORS)),
    "an unknown rotation": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ("config.json", "spiral", "use rope_type default or llama3 or yarn"),
    ),
    "a rotation of an older form": (
        config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
        ("config.json", "dynamic", "use rope_type default or llama3 or yarn"),
    ),
    "a rotation of a part of each head": (
        config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("config.json", "partial_rotary_factor", "over whole heads"),
    ),
    "a bias of attention": (
        config(attention_bias=True),
        ("config.json", "attention_bias", "use a checkpoint without it"),
    ),
    "an activation": (config(hidden_act="relu"), ("config.json", "relu", "use a model with silu")),
    "a missing tensor": (
        tensors(lambda found: found.pop(Q_PROJ)),
        (f"no tensor {Q_PROJ}", SAFETENSORS),
    ),
    "an extra tensor": (
        tensors(lambda found: found.update({"model.extra.weight": torch.zeros(2)})),
        (SINGLE, "has no tensor model.extra.weight", "copy both from the same checkpoint"),
    ),
    "a layer too many": (
        config(num_hidden_layers=1),
        (SINGLE, "has no tensor model.layers.1.", "copy both from the same checkpoint"),
    ),
    "another shape": (
        replaced(Q_PROJ, lambda x: x[:, :8].contiguous()),
        (SINGLE, Q_PROJ, "shape [16, 8]", "copy both from the same checkpoint"),
    ),
    "an integer": (
        replaced(NORM, lambda x: x.int()),
        (SINGLE, NORM, "I32", "use a checkpoint in floating point"),
    ),
    "an untied model without a head": (
        config(tie_word_embeddings=False),
        (f"no tensor {HEAD}", SAFETENSORS),
    ),
    "a tied head that differs": (
        tensors(lambda found: found.update({HEAD: found[EMBEDDING] + 1})),
        (SINGLE, f"{HEAD} is not {EMBEDDING}", "set tie_word_embeddings to false"),
    ),
    "a truncated file": (cut(SINGLE, 1), (SINGLE, "not a complete", SAFETENSORS)),
    "a truncated header": (cut(SINGLE, 10**4), (SINGLE, "not a complete", SAFETENSORS)),
    "a truncated shard": (
        both(shards(), cut(SHARDS[1], 5)),
        (SHARDS[1], "not a complete", SAFETENSORS),
    ),
    "a shard that is missing": (
        both(shards(), lambda folder: (folder / SHARDS[1]).unlink()),
        (INDEX, f"{SHARDS[1]}", SAFETENSORS),
    ),
    "an index that names the other shard": (
        shards(lambda folder, index: index.update({NORM: SHARDS[0]})),
        (INDEX, f"{NORM} should be in {SHARDS[0]}", SAFETENSORS),
    ),
    "an index that names no file": (
        shards(lambda folder, index: index.update({NORM: "model-3-of-2.safetensors"})),
        (INDEX, "model-3-of-2.safetensors", SAFETENSORS),
    ),
    "an index of an unknown tensor": (
        shards(lambda folder, index: index.update({"model.extra.weight": SHARDS[0]})),
        (INDEX, "model.extra.weight should be in", SAFETENSORS),
    ),
    "a tensor in two shards": (
        shards(also_in_the_second),
        (SHARDS[1], EMBEDDING, SAFETENSORS),
    ),
    "an index and a single file": (
        lambda folder: (
            shutil.copy(folder / SINGLE, folder / "copy"),
            shards()(folder),
            (folder / "copy").rename(folder / SINGLE),
        ),
        (SINGLE, "is not part of the checkpoint", "remove it"),
    ),
    "weights of PyTorch alone": (
        lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"),
        ("neither model.safetensors nor",),
    ),
    "NaN": (replaced(NORM, filled(float("nan"))), (SINGLE, NORM, "not finite", "copy it again")),
    "infinity in bfloat16": (
        both(everything(lambda x: x.bfloat16()), replaced(Q_PROJ, filled(float("-inf")))),
        (SINGLE, Q_PROJ, "not finite", "copy it again"),
    ),
    "NaN in float16": (
        both(everything(lambda x: x.half()), replaced(EMBEDDING, filled(float("nan")))),
        (SINGLE, EMBEDDING, "not finite", "copy it again"),
    ),
}
ACCEPTED: dict[str, Change] = {
    "as it is": lambda folder: None,
    "shards": shards(),
    "a tied head that is equal": tensors(lambda found: found.update({HEAD: found[EMBEDDING] * 1})),
    "bfloat16": everything(lambda x: x.bfloat16()),
    "float64": everything(lambda x: x.double()),
    "a mixture of dtypes": both(
        replaced(Q_PROJ, lambda x: x.bfloat16()), replaced(EMBEDDING, lambda x: x.half())
    ),
    "the largest number": replaced(NORM, filled(torch.finfo(torch.float32).max)),
    "an older rotation": config(
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    ),
    "a buffer of older files": tensors(
        lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep `areal-lite train` from starting processes, and note that it would have."""
    found: list[str] = []
    monkeypatch.setattr("areal_lite.launch.local.train", lambda *_: found.append("processes"))
    monkeypatch.setattr("areal_lite.launch.local.finish", lambda *_: None)
    return found


def train(model: Path) -> int:
    (model.parent / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    rows = f"{model.parent}/rows.jsonl"
    data = ["data.source=jsonl", f"data.path={rows}", "data.prompt_key=question"]
    data += ["data.answer_key=answer", "eval.problems=0", "data.chat=false"]
    data += ["reward.function=areal_lite.rewards.exact:exact_reward"]
    return cli.main(["train", f"model={model}", f"run_dir={model.parent}/run", *data])


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_folder_is_refused_in_one_line(
    kind: str, model: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = REFUSED[kind]
    change(model)
    assert train(model) != 0 and not started
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("areal")]
    [line] = errors
    at = [line.find(part) for part in (str(model), *said)]
    assert -1 not in at, line
    assert "Traceback" not in line and len(line) < 400


@pytest.mark.parametrize("kind", ACCEPTED)
def test_an_unusual_folder_is_trained(
    kind: str, model: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ACCEPTED[kind](model)
    assert train(model) == 0, capsys.readouterr().err
    assert started == ["processes"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found(
    dtype: torch.dtype, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "_CHUNK", 8)
    largest = torch.finfo(dtype).max
    good = {"a": torch.ones(5, 3, dtype=dtype), "b": torch.full((7,), -largest, dtype=dtype)}
    save_file(good | {"empty": torch.zeros(0, dtype=dtype)}, tmp_path / SINGLE)
    model_folder.check_numbers(tmp_path)
    for at in ((0, 0), (2, 1), (4, 2)):
        good["a"][at] = bad
        save_file(good, tmp_path / SINGLE)
        with pytest.raises(ValueError, match="model.safetensors: a has numbers that are not fin"):
            model_folder.check_numbers(tmp_path)
        good["a"][at] = 1.0
