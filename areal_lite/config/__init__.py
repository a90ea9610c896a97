"""The configuration of every command: typed sections, and the file of a run.

Each part of the settings has its module. fields.py declares one setting with its allowed values
and help, rules.py holds the rules over several, compose.py reads conf/ and the command line, and
reference.py makes the help and docs/configuration.md. Nothing here imports torch.
"""

from areal_lite.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    ShapingConfig,
)
from areal_lite.config.cluster import ClusterConfig
from areal_lite.config.commands import (
    COMMANDS,
    EvalCommandConfig,
    GenerateConfig,
    MakeModelConfig,
    QuickstartConfig,
    SftConfig,
    SlurmConfig,
    TrainConfig,
    register,
)
from areal_lite.config.compose import compose_config, config_dir
from areal_lite.config.data import DataConfig, EvalConfig, RewardConfig
from areal_lite.config.fields import check_fields, settings_of
from areal_lite.config.files import load_config, save_config, to_dataclass
from areal_lite.config.rollout import BufferConfig, ReplayConfig, RolloutConfig
from areal_lite.config.servers import ServerConfig, SyncConfig
from areal_lite.config.trainer import LoggerConfig, TrainerConfig

__all__ = [
    "AdvantageConfig",
    "AlgoConfig",
    "BufferConfig",
    "COMMANDS",
    "ClusterConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "EvalCommandConfig",
    "EvalConfig",
    "GenerateConfig",
    "KLConfig",
    "LoggerConfig",
    "MakeModelConfig",
    "QuickstartConfig",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "ServerConfig",
    "SftConfig",
    "ShapingConfig",
    "SlurmConfig",
    "SyncConfig",
    "TrainConfig",
    "TrainerConfig",
    "check_fields",
    "compose_config",
    "config_dir",
    "load_config",
    "register",
    "save_config",
    "settings_of",
    "to_dataclass",
]
