"""The Megatron-core engine: a Hugging Face folder becomes a policy that trains.

Importing this package adapts `megatron.core` to this machine before anything else can import it;
see `patches`.
"""

import warnings

from areal_lite.megatron.patches import install

# Megatron repeats this warning a dozen times. The replacements work, with the repairs in `patches`.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed")
install()
