"""The files of a Hugging Face checkpoint folder, checked before anything starts, without torch.

Each problem is a ValueError of one line that names the file, the place in it and the remedy.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from areal_lite.config import TrainerConfig
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.routes import ExpertLayout
from areal_lite.system.files import read_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Tensors that a checkpoint may have and a model may do without.
EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MTP = "mtp."  # predicts several tokens at once, for speculation, and is not trained
_OPTIONAL = (".bias", ".inv_freq", _HEAD)
_CHUNK = 1 << 17  # bytes that are looked at at a time: the processor's caches hold them
# dtype -> integers of its size, and all bits of its exponent, which only what is not finite has.
_EXPONENTS = {
    "F64": (np.uint64, np.uint64(0x7FF << 52)),
    "F32": (np.uint32, np.uint32(0xFF << 23)),
    "BF16": (np.uint16, np.uint16(0xFF << 7)),
    "F16": (np.uint16, np.uint16(0x1F << 10)),
}
UNTRAINED = ".e_score_correction_bias"  # the end of the names of tensors that no training changes
# The names in `megatron.architectures`, which imports torch.
MODEL_TYPES = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "smollm3", "phi3", "olmo3", "glm4_moe"),
    *("gemma3_text", "gpt_oss", "deepseek_v3"),
    *(DELTA_NETS := ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
)
# The layers that have a window, of `sliding_window` tokens: all, or those that `layer_types` names.
WINDOWS = dict.fromkeys(("qwen3_moe", "mistral", "phi3"), "all") | dict.fromkeys(
    ("qwen2", "qwen3", "smollm3", "olmo3", "gemma3_text", "gpt_oss"), "typed"
)
# How rotary frequencies may be stretched, where that is not all of _ROPE_TYPES.
ROPE_TYPES = dict.fromkeys(_PARTIAL := ("phi3", "glm4_moe", *DELTA_NETS), ("default",)) | {
    "gemma3_text": ("default", "linear"),
    "deepseek_v3": ("default", "yarn"),
}
_ROPE_TYPES = ("default", "llama3", "yarn")
# Tensor parallelism splits these evenly.
_SPLIT_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "linear_num_key_heads"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_SIZES = (
    *("vocab_size", "hidden_size", "head_dim", "num_hidden_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_group", *_SPLIT_SIZES),
)
_DTYPES = ("F64", "F32", "F16", "BF16")


def check_model_folder(folder: Path) -> None:
    """Check a folder's tokenizer, its JSON files and its weights. Raises ValueError."""
    Tokenizer(folder)
    check_weights(folder)


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the experts of a layer by config.json, 0 for a dense model."""
    # transformers 5 writes the second name, and older releases the first; GLM has the third.
    names = "num_experts", "num_local_experts", "n_routed_experts"
    return next((config[name] for name in names if config.get(name)), 0)


def dense_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers have no experts: the first ones, of a mixture by config.json."""
    return min(config.get("first_k_dense_replace") or 0, config["num_hidden_layers"])


def has_window(hf: Any) -> list[bool]:
    """Return for each layer whether its tokens see the last `sliding_window` tokens only.

    hf: a configuration of transformers.
    """
    kind, used = WINDOWS.get(hf.model_type), getattr(hf, "use_sliding_window", True)
    if not (kind and used and hf.sliding_window):
        return [False] * hf.num_hidden_layers
    types = hf.layer_types if kind == "typed" else ["sliding_attention"] * hf.num_hidden_layers
    return [each == "sliding_attention" for each in types]


def has_delta_net(hf: Any) -> list[bool]:
    """Return for each layer whether it has a gated delta net in place of attention."""
    types = getattr(hf, "layer_types", None) or [""] * hf.num_hidden_layers
    return [each == "linear_attention" for each in types]


def expert_layout(folder: Path) -> ExpertLayout | None:
    """Return the experts of a model folder, None for a dense model."""
    config = read_json(folder / "config.json")
    if not (experts := num_experts(config)):
        return None
    return ExpertLayout(
        layers=config["num_hidden_layers"] - dense_layers(config),
        dense=dense_layers(config),
        experts=experts,
        top_k=config["num_experts_per_tok"],
    )


def unsupported(config: Mapping[str, Any]) -> str:
    """Say what the trainer cannot train of a model with this config.json; "" for nothing."""
    kind = config.get("model_type")
    if "vision_config" in config:
        how = "AutoModelForCausalLM.from_pretrained(FOLDER)"
        if kind == "gemma3":  # transformers has no conversion
            how = "whole = Gemma3Model.from_pretrained(FOLDER); text ="
            how += " Gemma3ForCausalLM(whole.config.text_config); text.model.load_state_dict("
            how += "whole.language_model.state_dict()); text"
        return (
            f"model type {kind!r} has a vision part, which is not trained: save its text model by"
            f" {how}.save_pretrained(NEW) of transformers, and its tokenizer"
        )
    if kind not in (None, *MODEL_TYPES):  # check_weights refuses None
        known = ", ".join(MODEL_TYPES)
        return f"model type {kind!r} is not supported by the trainer: use one of {known}"
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        return (
            f"quantization_config says {method!r:.40}, and training changes numbers that are not"
            " quantised: use the checkpoint in bfloat16 (docs/training.md, Models)"
        )
    names = [] if kind in ("qwen2", "glm4_moe", "gpt_oss") else ["attention_bias"]
    for name in ["mlp_bias", *names, *["sliding_window"] * (kind not in WINDOWS)]:
        if value := config.get(name):
            return f"{name}={value} is not supported by the trainer: use a checkpoint without it"
    activation = "gelu_pytorch_tanh" if kind == "gemma3_text" else "silu"
    key = "hidden_act" if "hidden_act" in config else "hidden_activation"
    if (found := config.get(key, activation)) != activation:
        return f"{key}={found} is not supported by the trainer: use a model with {activation}"
    return _unsupported_rope(kind, config)


def _unsupported_rope(kind: Any, config: Mapping[str, Any]) -> str:
    """Say why a rotary embedding is not supported. Older releases had other names for its parts."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    full = rope.get("full_attention", rope) if isinstance(rope, dict) else None
    if not isinstance(full, dict):
        return f"{key}={rope!r:.100} is not an object: copy the checkpoint again"
    found, known = full.get("rope_type", full.get("type")), ROPE_TYPES.get(kind, _ROPE_TYPES)
    part = full.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if (found or "default") in known and (part in (None, 1.0) or kind in _PARTIAL):
        return ""
    return (
        f"{key} {full!r:.150} are not supported by the trainer for {kind}: use rope_type"
        f" {' or '.join(known)}" + ("" if kind in _PARTIAL else ", over whole heads")
    )


def check_split(described: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Raise ValueError if the trainer cannot train a model with this config.json, or split it."""
    if problem := unsupported(described):
        raise ValueError(problem)
    ranks = trainer.tensor_parallel
    for name in _SPLIT_SIZES:
        if (size := described.get(name) or 0) % ranks:
            raise ValueError(f"{name}={size} cannot be split over trainer.tensor_parallel={ranks}")
    if (experts := num_experts(described) or 1) % trainer.expert_parallel:
        raise ValueError(
            f"a model with {experts} experts a layer cannot be split over"
            f" trainer.expert_parallel={trainer.expert_parallel}"
        )
    if described.get("model_type") in DELTA_NETS and trainer.context_parallel > 1:
        raise ValueError(
            f"{described['model_type']} passes states on: set trainer.context_parallel to 1"
        )
    if described.get("model_type") == "deepseek_v3" and trainer.lora.rank:
        raise ValueError("deepseek_v3 takes no adapters: set trainer.lora.rank to 0")
    layers, stages = described.get("num_hidden_layers") or 0, trainer.pipeline_parallel
    if layers % (stages * trainer.virtual_pipeline):
        raise ValueError(
            f"{layers} layers cannot be split over trainer.pipeline_parallel={stages} x"
            f" trainer.virtual_pipeline={trainer.virtual_pipeline}: make their product divide the"
            " layers"
        )


def weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its safetensors file: from the index, or model.safetensors.

    Raises ValueError if a file is missing or damaged, or if SGLang would read another one, too.
    """
    named = read_json(folder / _INDEX).get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{folder / _INDEX}: weight_map is not an object of file names")
    files = {folder / file for file in named.values()} or {folder / _SINGLE}
    found = set(folder.glob("*.safetensors"))
    if odd := [path for path in found if not path.is_file()]:
        raise ValueError(f"{odd[0]} is not a file, and SGLang would read it: remove it")
    if not found or not (named or files <= found):
        raise ValueError(
            f"{folder}: neither {_SINGLE} nor {_INDEX}; is it a Hugging Face checkpoint folder?"
        )
    if others := found - files if not named else {folder / _SINGLE} & found - files:
        raise ValueError(
            f"{min(others)} is not part of the checkpoint but SGLang or transformers would read it:"
            " remove it"
        )
    tensors: dict[str, Path] = {}
    for path in sorted(files & found):
        try:
            with safe_open(path, "numpy") as reader:
                here = dict.fromkeys(reader.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: not a complete safetensors file ({error}); copy the checkpoint again"
            ) from None
        if twice := tensors.keys() & here:
            raise ValueError(
                f"{path}: {min(twice)} is in {tensors[min(twice)].name}, too;"
                " copy the checkpoint again"
            )
        tensors |= here
    for tensor, file in named.items():
        if tensors.get(tensor) != folder / file:
            why = "does not have it" if folder / file in found else "is not there"
            raise ValueError(
                f"{folder / _INDEX}: {tensor} should be in {file}, which {why};"
                " copy the checkpoint again"
            )
    return tensors


def open_tensors(files: Mapping[str, Path], framework: str) -> dict[str, Any]:
    """Map each tensor name of `weight_files` to its open file; framework: as for `safe_open`."""
    opened = {path: safe_open(path, framework) for path in set(files.values())}
    return {name: opened[path] for name, path in files.items()}


def check_weights(folder: Path) -> None:
    """Raise ValueError unless the files are complete and their tensors match config.json.

    Tensors of other architectures than MODEL_TYPES are not looked at.
    """
    tensors = weight_files(folder)
    config = read_json(folder / "config.json")
    if type(kind := config.get("model_type")) is not str:
        raise ValueError(f"{folder / 'config.json'}: model_type={kind!r:.100} is not a string")
    if kind not in MODEL_TYPES:
        return
    for key in _SIZES:
        size = config.get(key, 1)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"{folder / 'config.json'}: {key}={size!r} is not a positive integer;"
                " copy the checkpoint again"
            )
    try:
        _check_tensors(folder, tensors, config)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: a value is missing or of a wrong type"
            f" ({type(error).__name__}: {error}); copy the checkpoint again"
        ) from None


def _check_tensors(folder: Path, tensors: Mapping[str, Path], config: Mapping[str, Any]) -> None:
    if problem := next(_misread(config), ""):
        raise ValueError(f"{folder / 'config.json'}: {problem}")
    # In their order, because there may be more names than memory holds.
    for name in tensor_names(config):
        if name not in tensors:
            raise ValueError(f"{folder}: no tensor {name}; copy the checkpoint again")
    others = tensors.keys() - set(tensor_names(config))
    if extra := {name for name in others if not is_optional(name, config)}:
        raise ValueError(
            f"{tensors[min(extra)]}: config.json's {config['model_type']} has no tensor"
            f" {min(extra)}; copy both from the same checkpoint"
        )
    if _is_tied(config) and _HEAD in tensors:
        head, embedding = (_raw_tensors(tensors[name])[name][1] for name in (_HEAD, EMBEDDING))
        equal = map(np.array_equal, _chunks(head), _chunks(embedding))
        if len(head) != len(embedding) or not all(equal):
            raise ValueError(
                f"{tensors[_HEAD]}: {_HEAD} is not {EMBEDDING}, but config.json ties them: set"
                " tie_word_embeddings to false there, or remove the tensor"
            )
    for name, reader in open_tensors(tensors, "numpy").items():
        part, where = reader.get_slice(name), f"{tensors[name]}: {name}"
        _check_tensor(where, part.get_shape(), part.get_dtype(), name, config)


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output layer is the embedding: Gemma's, where config.json does not say."""
    return bool(config.get("tie_word_embeddings", config["model_type"] == "gemma3_text"))


def is_optional(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model may do without a tensor, as without a layer for later tokens."""
    later = f"model.layers.{config.get('num_hidden_layers')}."  # behind the last one
    is_later = name.startswith(later) and bool(config.get("num_nextn_predict_layers"))
    return is_later or name.endswith(_OPTIONAL) or name.startswith(_MTP)


def _misread(config: Mapping[str, Any]) -> Iterator[str]:
    """Say what SGLang reads otherwise than the trainer, or lacks, of one of MODEL_TYPES."""
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    part = config.get("partial_rotary_factor", 0.25 if kind in DELTA_NETS else 1.0)
    older = "rope_theta and rope_scaling" if kind == "olmo3" and rope else ""
    if kind in ("phi3", *DELTA_NETS) and rope.get("partial_rotary_factor", part) != part:
        older = "partial_rotary_factor"
    if older:
        yield (
            f"SGLang does not read rope_parameters of {kind}: write {older} beside the other"
            " fields, as the released checkpoints do"
        )
    if kind in DELTA_NETS:
        interval, types = config.get("full_attention_interval"), config.get("layer_types") or []
        kinds = ("full_attention", "linear_attention")
        if type(interval) is not int or any(
            each != kinds[_is_net(config, layer)] for layer, each in enumerate(types)
        ):
            yield (
                f"SGLang reads full_attention_interval={interval!r:.20}, which does not describe"
                " layer_types: write how often a layer has full attention"
            )
    if kind == "gpt_oss" and "quantization_config" in config:
        yield (
            "gpt_oss is quantised, and training changes its numbers: write it in bfloat16"
            " (docs/training.md, Models)"
        )
    if kind == "gpt_oss" and "swiglu_limit" not in config:
        yield "no swiglu_limit, which SGLang reads; copy it again"
    told = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
    for name, value in told.items() if kind == "deepseek_v3" else ():
        if (found := config.get(name)) != value:
            yield f"{name}={found!r:.50}, but the trainer computes {kind} with {json.dumps(value)}"


def _is_net(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of one of DELTA_NETS has no attention."""
    return (layer + 1) % (config.get("full_attention_interval") or 4) > 0


def check_numbers(folder: Path) -> None:
    """Raise ValueError for a tensor with a number that is not finite."""

    def check(path: Path) -> None:
        for name, (dtype, data) in _raw_tensors(path).items():
            if dtype not in _EXPONENTS:
                continue
            integers, infinite = _EXPONENTS[dtype]
            for piece in _chunks(data):
                if (piece.view(integers) & infinite).max() == infinite:
                    raise ValueError(
                        f"{path}: {name} has numbers that are not finite; copy it again"
                    )

    with ThreadPoolExecutor() as threads:
        list(threads.map(check, sorted(set(weight_files(folder).values()))))


def _raw_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Map the bytes of all tensors of a safetensors file, uint8 [n], with their dtypes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + size) if any(header) else np.empty(0, np.uint8)
    return {
        name: (each["dtype"], data[slice(*each["data_offsets"])]) for name, each in header.items()
    }


def _chunks(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def tensor_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors that a config.json of one of MODEL_TYPES implies."""
    yield from (EMBEDDING, "model.norm.weight")
    if not _is_tied(config):
        yield _HEAD
    nets, experts = config["model_type"] in DELTA_NETS, range(num_experts(config))
    for layer in range(config.get("num_hidden_layers") or 0):
        for name in layer_tensors(config, layer, has_net=nets and _is_net(config, layer)):
            numbers = experts if "{expert}" in name else (0,)
            yield from (f"model.layers.{layer}.{name.format(expert=number)}" for number in numbers)


def layer_tensors(config: Mapping[str, Any], layer: int, *, has_net: bool) -> Iterator[str]:
    """Yield the names of a layer's tensors, below model.layers.N, with `{expert}` for a number.

    has_net: it has a gated delta net in place of attention.
    """
    kind = config["model_type"]
    around = kind == "gemma3_text"
    after = around or kind == "olmo3"
    parts = ["post_attention_layernorm"]
    parts += ["post_feedforward_layernorm"] * after
    parts += ["input_layernorm"] * (around or not after) + ["pre_feedforward_layernorm"] * around
    yield from (f"{part}.weight" for part in parts)
    if has_net:
        inputs = ("qkvz", "ba") if kind == "qwen3_next" else ("qkv", "z", "b", "a")
        yield from (f"linear_attn.{name}" for name in ("A_log", "dt_bias"))
        yield from (f"linear_attn.in_proj_{name}.weight" for name in inputs)
        yield from (f"linear_attn.{name}.weight" for name in ("conv1d", "norm", "out_proj"))
    else:
        yield from _attention(config)
    yield from _mlp(config, layer)


def _attention(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config["model_type"]
    names = ["qkv_proj"] if kind == "phi3" else ["q_proj", "k_proj", "v_proj"]
    if kind == "deepseek_v3":
        queries = ["q_a_proj", "q_a_layernorm", "q_b_proj"]
        names = queries if config.get("q_lora_rank") else ["q_proj"]
        names += ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"]
    normed = kind.startswith("qwen3") or kind in ("gemma3_text", "olmo3")
    norms = ("q_norm", "k_norm") if normed or config.get("use_qk_norm") else ()
    yield from (f"self_attn.{name}.weight" for name in (*names, "o_proj", *norms))
    biased = kind in ("qwen2", "gpt_oss") or (kind == "glm4_moe" and config.get("attention_bias"))
    yield from (f"self_attn.{name}_proj.bias" for name in "qkv" * bool(biased))
    if kind == "gpt_oss":
        yield from ("self_attn.o_proj.bias", "self_attn.sinks")


def _mlp(config: Mapping[str, Any], layer: int) -> Iterator[str]:
    kind, mlps = config["model_type"], ["mlp"]
    if kind == "gpt_oss":
        yield from ("mlp.router.weight", "mlp.router.bias")
        for name in ("gate_up_proj", "down_proj"):
            yield from (f"mlp.experts.{name}", f"mlp.experts.{name}_bias")
        return
    if num_experts(config) and layer >= dense_layers(config):
        yield "mlp.gate.weight"
        mlps = ["mlp.experts.{expert}"]
        if kind in ("glm4_moe", "deepseek_v3"):
            yield f"mlp.gate{UNTRAINED}"
            mlps += ["mlp.shared_experts"]
        if kind in DELTA_NETS:
            yield "mlp.shared_expert_gate.weight"
            mlps += ["mlp.shared_expert"]
    for mlp in mlps:
        for name in ("gate_up", "down") if kind == "phi3" else ("gate", "up", "down"):
            yield f"{mlp}.{name}_proj.weight"


def _check_tensor(
    where: str, shape: list[int], dtype: str, name: str, config: Mapping[str, Any]
) -> None:
    expected = expected_shape(name, config)
    if expected is None:
        return
    if shape != expected:
        raise ValueError(
            f"{where} has the shape {shape}, but config.json implies {expected};"
            " copy both from the same checkpoint"
        )
    if dtype not in _DTYPES and "quantization_config" not in config:
        raise ValueError(
            f"{where} has the dtype {dtype}, not one of {', '.join(_DTYPES)}; use a checkpoint in"
            " floating point"
        )


def _latent_shapes(config: Mapping[str, Any], hidden: int, heads: int) -> dict[str, list[int]]:
    """Return the shapes of multi-latent attention, if a model has it."""
    if config["model_type"] != "deepseek_v3":
        return {}
    plain, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, rank, queries = config["v_head_dim"], config["kv_lora_rank"], config["q_lora_rank"]
    return {
        "q_proj": [heads * (plain + rope), hidden],
        "q_a_proj": [queries, hidden],
        "q_a_layernorm": [queries],
        "q_b_proj": [heads * (plain + rope), queries],
        "kv_a_proj_with_mqa": [rank + rope, hidden],
        "kv_a_layernorm": [rank],
        "kv_b_proj": [heads * (plain + value), rank],
        "o_proj": [hidden, heads * value],
    }


def expected_shape(name: str, config: Mapping[str, Any]) -> list[int] | None:
    """Return the shape that a config.json of MODEL_TYPES implies, if it does: [out, in]."""
    module, kind = name.split(".")[-2:] if "." in name else (name, "")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        # Qwen3 and Gemma have defaults, which are not of this form.
        own = config["model_type"].startswith(("qwen3", "gemma3"))
        dim = config["head_dim"] if own else config.get("head_dim") or hidden // heads
        queries, keys = heads * dim, config["num_key_value_heads"] * dim
        part = "shared_expert_" if ".shared_expert." in name else "moe_" * ("experts." in name)
        number = config["n_shared_experts"] if ".shared_experts." in name else 1
        width = number * config.get(f"{part}intermediate_size", 0)
        if module == "experts":  # of gpt-oss
            inner = config["intermediate_size"]
            sizes = [hidden, 2 * inner] if kind.startswith("gate_up") else [inner, hidden]
            return [num_experts(config), *sizes[kind.endswith("_bias") :]]
        shape = {
            "embed_tokens": [config["vocab_size"], hidden],
            "lm_head": [config["vocab_size"], hidden],
            "norm": [hidden],
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "pre_feedforward_layernorm": [hidden],
            "post_feedforward_layernorm": [hidden],
            "q_norm": [queries if config["model_type"] == "olmo3" else dim],
            "k_norm": [keys if config["model_type"] == "olmo3" else dim],
            "qkv_proj": [queries + 2 * keys, hidden],
            "gate_up_proj": [2 * (width or 0), hidden],
            "q_proj": [queries * (1 + (config["model_type"] in DELTA_NETS)), hidden],
            "k_proj": [keys, hidden],
            "v_proj": [keys, hidden],
            "o_proj": [hidden, queries],
            "gate_proj": [width, hidden],
            "up_proj": [width, hidden],
            "down_proj": [hidden, width],
            "shared_expert_gate": [1, hidden],
            "self_attn": [heads],  # sinks
            **_latent_shapes(config, hidden, heads),
            **dict.fromkeys(("gate", "router"), [num_experts(config), hidden]),
        }[module]
    except (KeyError, TypeError):
        return None
    if None in shape or ".linear_attn." in name:
        return None
    return shape[:1] if kind.endswith("bias") else shape
