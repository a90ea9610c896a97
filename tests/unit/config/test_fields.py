"""Every setting has its help, its bounds are checked, and the reference page is up to date."""

import math
import runpy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from areal_lite.algo import correction, losses, sequences
from areal_lite.config import AlgoConfig, TrainConfig, check_fields, command_names, find_command
from areal_lite.config.algo import CorrectionConfig, KLConfig
from areal_lite.config.command_line import compose_config
from areal_lite.config.fields import settings_of
from areal_lite.config.help import help_text
from areal_lite.extensions import load_object
from areal_lite.megatron.architectures import ARCHITECTURES
from areal_lite_quickstart.command import MakeModelConfig, QuickstartConfig


def schemas(schema: type) -> set[type]:
    """The dataclass and its sections."""
    parts = {hint for hint in get_type_hints(schema).values() if is_dataclass(hint)}
    return {schema}.union(*map(schemas, parts))


COMMANDS = {name: find_command(name) for name in command_names()}
ALL = sorted(
    set().union(*(schemas(command.schema) for command in COMMANDS.values())),
    key=lambda schema: schema.__name__,
)


@pytest.mark.parametrize("schema", ALL)
def test_every_setting_has_help_and_a_default_that_is_allowed(schema):
    settings, default = settings_of(schema), schema()
    for item in fields(schema):
        if is_dataclass(getattr(default, item.name)):
            continue
        setting = settings[item.name]
        assert setting.help.endswith(".") and setting.help[-2] != "."
        assert (value := getattr(default, item.name)) is None or setting.accepts(value)


@pytest.mark.parametrize("schema", ALL)
def test_every_number_has_a_lower_and_an_upper_bound(schema):
    for name, kind in get_type_hints(schema).items():
        if not {int, float} & {kind, *get_args(kind), *map(first_argument, get_args(kind))}:
            continue
        setting = settings_of(schema)[name]
        assert setting.within, name
        lowest, highest = setting.within
        assert -1e6 <= lowest < highest <= 2**31, name
        for wrong in (math.nan, math.inf, -math.inf, 10**20, -(10**20)):
            assert not setting.accepts(wrong), name


def first_argument(kind):
    """Return the type of the items, float for list[float]."""
    return next(iter(get_args(kind)), None)


def test_sections_of_sections_are_checked_and_named():
    check_fields(QuickstartConfig())
    config = QuickstartConfig()
    config.sft.trainer.lr = 0.0
    with pytest.raises(
        ValueError,
        match=r"^sft.trainer.lr=0.0: must be .* at most 1 \(Learning rate.\)$",
    ):
        check_fields(config)
    with pytest.raises(ValueError, match="^architecture=gpt2: choose one of qwen3, qwen2"):
        check_fields(MakeModelConfig(architecture="gpt2"))
    config = TrainConfig()
    config.buffer.replay.recency_probability = 2.0
    with pytest.raises(ValueError, match="buffer.replay.recency_probability=2.0: must be "):
        check_fields(config)


def test_instances_do_not_share_lists_and_dicts():
    one, other = TrainConfig(), TrainConfig()
    one.rollout.filters.append("a:b")
    one.server.args["a"] = 1
    assert other.rollout.filters == [] and other.server.args == {}


def test_choices_are_those_of_the_code_that_reads_them():
    correction_settings = settings_of(CorrectionConfig)
    assert correction_settings["mode"].choices == correction.MODES
    assert correction_settings["level"].choices == correction.LEVELS
    assert settings_of(AlgoConfig)["reduction"].choices == sequences.REDUCTIONS
    assert settings_of(KLConfig)["estimator"].choices == losses.ESTIMATORS
    assert set(settings_of(MakeModelConfig)["architecture"].choices) == set(ARCHITECTURES)


def test_every_command_and_option_can_be_run():
    for command in COMMANDS.values():
        modes = [mode.entry for mode in command.modes.values()]
        for entry in filter(None, (command.entry, command.check, command.adapt, *modes)):
            load_object("entry", entry)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_setting_and_fits_the_terminal(command):
    text = help_text(command, compose_config(command, []))
    for name in settings_of(COMMANDS[command].schema):
        assert f"\n  {name}" in f"\n{text}"
    assert "\0" not in text
    wide = [line for line in text.splitlines() if len(line) > 100]
    assert all("=" in line and line.startswith("  ") for line in wide), "only a long value may"


def test_the_reference_page_is_up_to_date():
    docs = Path(__file__).parents[3] / "docs"
    page = runpy.run_path(str(docs / "configuration_page.py"))["page"]()
    assert (docs / "configuration.md").read_text() == page, (
        "run: python docs/configuration_page.py > docs/configuration.md"
    )
