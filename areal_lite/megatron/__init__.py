"""Loss -> weights: the Megatron-core engine and the training loop.

Importing this package prepares `megatron.core` for a machine without CUDA, before anything can import it (see `megatron_cpu`).
"""

import warnings

from areal_lite.megatron.patches import install

# Megatron says so a dozen times; what it uses instead works, and is mended where it did not.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed")
install()
