"""The configuration of every command: typed sections, and the file of a run.

fields.py declares a setting with its allowed values and help, rules.py has the rules over several,
command_line.py composes conf/ and the overrides. Nothing here imports torch.
"""

# ruff: noqa: F401 - the other rooms import these names from here

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.commands import TrainConfig, command_names, find_command
from areal_lite.config.data import (
    DataConfig,
    RewardConfig,
    longest_sequence,
    naming,
    reference_folders,
    source_configs,
)
from areal_lite.config.fields import check_fields, settings_of
from areal_lite.config.files import (
    changed_settings,
    load_config,
    save_config,
    stored_settings,
    value_of,
    without_secrets,
)
from areal_lite.config.sections import (
    BufferConfig,
    LoggerConfig,
    LoraConfig,
    ReplayConfig,
    RestartConfig,
    RolloutConfig,
    ServerConfig,
    SyncConfig,
    TrainerConfig,
)
