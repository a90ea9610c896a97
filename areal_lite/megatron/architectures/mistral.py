"""Mistral, dense: the plain layer. Checkpoints with an active sliding window (7B v0.1) are refused."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, Architecture

MISTRAL = Architecture("mistral", ATTENTION | GATED_MLP)
