"""Checks of a configuration before anything starts, without torch.

Here are the checks of model folders, data files, GPUs, functions given by name, and runs
that exist already. Rules that need nothing but the settings are in config/rules.py.
"""

import os
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from areal_lite.config import (
    LoraConfig,
    ServerConfig,
    TrainConfig,
    TrainerConfig,
    changed_settings,
    check_fields,
    longest_sequence,
    naming,
    reference_folders,
    source_configs,
    stored_settings,
    value_of,
)
from areal_lite.config.commands import Command
from areal_lite.config.data import Sampled
from areal_lite.config.rules import cautions, check_rules, check_targets
from areal_lite.controller.dispatcher import zero_variance
from areal_lite.data.model_folder import DELTA_NETS, check_split, expert_layout, num_experts
from areal_lite.data.prompts import prompt_source
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.extensions import DEBUG_MODES, load, load_object, names
from areal_lite.launch.roles import place_run
from areal_lite.rewards.worker import load_reward_function
from areal_lite.rollout.episode import load_workflow
from areal_lite.run_dir.metrics import tracker_class
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, CONFIG_FILE, METRICS_FILE, STORE_FILE
from areal_lite.system.files import read_json
from areal_lite.system.gpus import check_cuda, resolve_device
from areal_lite.system.network import NODE, free_port

_RUN_FILES = (CONFIG_FILE, METRICS_FILE, STORE_FILE, CHECKPOINTS_DIR)
# What a run that continues keeps: what decides which prompts are drawn, and in which order.
_FIXED = re.compile(
    r"(model|seed|data\.sources)$"
    r"|data\.(sources\.[^.]+\.)?(?!(sources|eval_path|reward|workflow|workflow_args|reference)\b)"
)


def check_config(command: Command, config: Any) -> list[str]:
    """Judge the configuration of a command, and return its cautions. Raises ValueError."""
    check_fields(config)
    check_rules(config)
    if command.check:
        load_object("check", command.check)(config)
    return cautions(config) if isinstance(config, TrainConfig) else []


def check_run(config: TrainConfig, *, dense: bool | None = None) -> None:
    """Check what a training run needs of this machine and of files. Raises ValueError.

    `dense` says whether the model, which does not exist yet, has no experts. None: it exists.
    """
    if dense is None:
        check_model("model", config.model)
        check_layout(config.trainer, config.model)
        check_window(config)
    check_sources(config)
    check_servers(config.server, config.model)
    if config.algo.routing_replay and (dense or expert_layout(Path(config.model)) is None):
        raise ValueError(
            f"algo.routing_replay=true: model={config.model} has no experts to route to, so set it "
            "to false"
        )
    if ":" in config.algo.loss:
        # A loss of your own imports torch, which other runs do not wait for here.
        from areal_lite.trainer.objective import build_objective

        build_objective(config)
    _training(config)
    check_run_dir_of(config)


def check_run_dir_of(config: Any) -> None:
    """Check that `run_dir` has no run, or one that this command may continue."""
    run_dir = Path(config.run_dir)
    if not any(os.path.exists(run_dir / file) for file in _RUN_FILES):
        return
    kind = type(config)
    if isinstance(config, TrainConfig):
        kind = TrainConfig
        if config.resume == "never":
            raise ValueError(already_there(config))
        if config.debug != "off":
            raise ValueError(f"debug={config.debug} continues no run: choose another run_dir")
        _same_run(config, run_dir)
    if set(stored_settings(run_dir)) != {item.name for item in fields(kind)}:
        raise ValueError(
            f"run_dir={run_dir} is the folder of another command, such as a training run: choose "
            "another folder"
        )


def already_there(config: TrainConfig) -> str:
    """Say that run_dir holds a run, and what to do."""
    return (
        f"run_dir={config.run_dir} holds a run already: choose another folder, remove it, "
        "or continue the run with resume=auto"
    )


def _same_run(config: TrainConfig, run_dir: Path) -> None:
    """Check that what a run cannot change is as in its stored configuration."""
    changed = changed_settings(config, run_dir)
    sources = value_of(stored_settings(run_dir), "data.sources")
    if list(sources or {}) != list(config.data.sources):
        changed["data.sources"] = list(config.data.sources), list(sources or {})
    for key, (now, before) in changed.items():
        if _FIXED.match(key):
            raise ValueError(
                f"{key}={now}: the run in run_dir={config.run_dir} started with {before} and can "
                "only continue with that"
            )
    now, before = changed.get("buffer.replay.capacity", (0, 0))
    if bool(before) != bool(now):
        raise ValueError(
            f"buffer.replay.capacity={now}: the run started with {before}, and replay cannot be "
            "turned on or off when it continues"
        )


def _training(config: TrainConfig) -> None:
    # The model itself has been checked, or the quickstart is about to make it.
    for source, folder in reference_folders(config).items():
        if folder not in (None, config.model):
            key = f"data.sources.{source}.reference" if source else "algo.reference"
            check_model(key, folder)
            check_layout(replace(config.trainer, lora=LoraConfig()), folder)
            _same_tokens(config.model, key, folder)
    for name in config.rollout.filters:
        if name != zero_variance.__name__:
            load_object("rollout.filters", name)
    for name in config.logger.trackers:
        if not isinstance(own := config.logger.args.get(name, {}), dict):
            key = f"logger.args.{name}"
            raise ValueError(f"{key}={own}: it is a section: set its keys, {key}.KEY=VALUE")
        tracker_class(name)
    _prompts_come_again(config)
    for path in config.eval.sets:
        if path.endswith(".jsonl") and not os.path.isfile(path):
            raise ValueError(f"eval.sets: {path}: no such file")
    if config.server.host != NODE:  # otherwise the run's GPUs are not this machine's
        place_run(config)
        _check_host(config.server.host)
        _weight_folder(config)
    if config.debug != "off":
        if (half := load(DEBUG_MODES, config.debug_mode)) is None:
            known = ", ".join(["off", *names(DEBUG_MODES)])
            raise ValueError(f"debug={config.debug}: choose one of {known}")
        half.check(config)


def check_model(key: str, model: str) -> None:
    """Check that `model`, the value of `key`, is the folder of a checkpoint."""
    for file in ("config.json", "tokenizer.json"):
        if not os.path.isfile(Path(model) / file):  # False, too, for a path that cannot be
            raise ValueError(
                f"{key}={model}: no {file} there; give the folder of a Hugging Face checkpoint "
                "(`hf download ORG/NAME --local-dir FOLDER` downloads one)"
            )


def check_layout(trainer: TrainerConfig, model: str) -> None:
    """Check that the trainer knows the model, can split it, and can adapt its layers."""
    described = read_json(file := Path(model) / "config.json")
    check_targets(trainer.lora, has_experts=num_experts(described) > 0)
    try:
        check_split(described, trainer)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def check_window(config: TrainConfig) -> None:
    """Check that no sequence fills a window that the servers leave out."""
    described = read_json(Path(config.model) / "config.json")
    kind, window = described.get("model_type"), described.get("sliding_window")
    used = described.get("use_sliding_window", kind in ("mistral", "phi3"))
    fills = isinstance(window, int) and longest_sequence(config) > window
    if not (used and fills) or kind == "olmo3":
        return
    if kind == "smollm3" or resolve_device(config.server.device) == "cuda":
        raise ValueError(
            f"model={config.model} has windows of {window} tokens, which SGLang computes otherwise"
            f" for {kind} on this device: let data.max_prompt_tokens + rollout.max_new_tokens,"
            f" {longest_sequence(config)}, be at most that"
        )


def _same_tokens(model: str, key: str, reference: str) -> None:
    """Check that the reference policy gives every token of the model the same id."""
    if not os.path.exists(Path(model) / "tokenizer.json"):
        return  # the quickstart is about to make it
    own, other = (Tokenizer(folder).ids for folder in (model, reference))
    for token, number in own.items():
        if other.get(token) != number:
            raise ValueError(
                f"{key}={reference}: token {token!r:.50} is {other.get(token)} there and "
                f"{number} in model={model}; choose a reference policy with the same tokenizer"
            )


def check_sources(config: Sampled) -> None:
    """Check the files, the reward and the workflow of each data source."""
    for name, own in source_configs(config).items():
        with naming(name):
            if own.data.source in ("jsonl", "hf") and not own.data.path:
                raise ValueError(f"data.path is not set: data.source={own.data.source} needs it")
            prompt_source(own.data)
            load_reward_function(own.reward.function)
            load_workflow(own.rollout)
            if own.data.source == "jsonl":
                _check_files(own)


def _check_files(config: Sampled) -> None:
    """Check that the command's files exist, to train and to evaluate."""
    data, remedy = config.data, "give held-out problems"
    if isinstance(config, TrainConfig):
        if not os.path.isfile(data.path or ""):
            raise ValueError(f"data.path={data.path}: no such file")
        if not config.eval.problems:
            return
        remedy += ", or set eval.problems=0"
    if not os.path.isfile(data.eval_path or ""):
        raise ValueError(f"data.eval_path={data.eval_path or 'null'}: no such file; {remedy}")


def _prompts_come_again(config: TrainConfig) -> None:
    """Check that prompts come again if some are to be asked less often."""
    sources = [own.data for own in source_configs(config).values()]
    if any(getattr(prompt_source(source), "num_prompts", 0) is not None for source in sources):
        return
    rollout = config.rollout
    above = "" if rollout.retire_above is None else f"retire_above={rollout.retire_above}"
    if setting := above or (rollout.rest_unsolved and f"rest_unsolved={rollout.rest_unsolved}"):
        raise ValueError(
            f"rollout.{setting} needs prompts that come again: "
            f"data.source={sources[0].source} always makes new ones"
        )


def check_servers(server: ServerConfig, model: str | None) -> None:
    """Check that servers of a model, which may not exist yet, can run on this machine."""
    if algorithm := server.args.get("speculative_algorithm"):
        _check_speculation(algorithm, server, model)
    if server.host != NODE and resolve_device(server.device) == "cuda":
        check_cuda()


def _check_speculation(algorithm: str, server: ServerConfig, model: str | None) -> None:
    key, device = f"server.args.speculative_algorithm={algorithm}", resolve_device(server.device)
    if (device == "cpu") != (algorithm.upper() == "HISTORY"):
        raise ValueError(
            f"{key} is not for this device: use history without a GPU, or one of SGLang's on a GPU"
        )
    if device == "cuda" and not server.args.get("disable_overlap_schedule"):
        raise ValueError(
            f"{key}: a push would count tokens of the pass before it to the new weights; set "
            "server.args.disable_overlap_schedule=true too"
        )
    described = read_json(Path(model) / "config.json") if model else {}
    if device == "cpu" and described.get("model_type") in DELTA_NETS:
        raise ValueError(
            f"{key}: model={model} has gated delta nets, whose state cannot go back to the token "
            "before a wrong draft: remove it"
        )


def _check_host(host: str) -> None:
    """Check that servers can listen at an address of this machine."""
    try:
        free_port(host)
    except (OSError, UnicodeError) as error:  # a name too long for the resolver
        raise ValueError(
            f"server.host={host}: {error}; choose an IPv4 address of this machine, or node"
        ) from None


def _weight_folder(config: TrainConfig) -> None:
    """Check that two versions of the weights, the old and the new one, fit where pushes go."""
    if config.sync.transport != "disk":
        return
    needed = 2 * sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors"))
    path = Path(config.sync.disk_path or config.run_dir).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    if needed > (free := shutil.disk_usage(existing).free):
        raise ValueError(
            f"sync.disk_path={config.sync.disk_path}: {free / 2**30:.1f} GiB are free there, and "
            f"two versions of the weights take {needed / 2**30:.1f}; choose another folder, or "
            "make it larger (`docker run --shm-size` for /dev/shm)"
        )
