"""Llama 2 and 3: the plain layer. Llama 3.1 stretches low rotary frequencies (see rope.py)."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, Architecture

LLAMA = Architecture(model_type="llama", layer=ATTENTION | GATED_MLP)
