"""Loss -> weights: the Megatron-core engine and the training loop.

Importing this package prepares `megatron.core` for a machine without CUDA, before anything can import it (see `megatron_cpu`).
"""

from areal_lite.trainer.megatron_cpu import install

install()
