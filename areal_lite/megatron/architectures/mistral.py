"""Mistral, dense: the plain layer. An active sliding window (7B v0.1) is refused."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, Architecture

MISTRAL = Architecture(model_type="mistral", layer=ATTENTION | GATED_MLP)
