"""The configuration of every command: typed sections, and the file of a run.

Each part of the settings has its module. fields.py declares one setting with its allowed values
and help, rules.py holds the rules over several, compose.py reads conf/ and the command line, and
reference.py makes the help and docs/configuration.md. Nothing here imports torch.
"""

# ruff: noqa: F401 - the other rooms import these names from here

from areal_lite.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    ShapingConfig,
)
from areal_lite.config.command_line import compose_config, config_dir, register
from areal_lite.config.commands import (
    ClusterConfig,
    SlurmConfig,
    TrainConfig,
    command_names,
    find_command,
)
from areal_lite.config.data import (
    DataConfig,
    EvalConfig,
    RewardConfig,
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
    to_dataclass,
)
from areal_lite.config.rollout import BufferConfig, ReplayConfig, RolloutConfig, StoreConfig
from areal_lite.config.servers import RestartConfig, ServerConfig, SyncConfig
from areal_lite.config.trainer import LoggerConfig, LoraConfig, TrainerConfig
