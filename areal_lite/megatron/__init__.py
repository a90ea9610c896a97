"""The Megatron-core engine: a Hugging Face folder becomes a policy that trains.

Importing this package adapts `megatron.core` to this machine before anything else can import it
(patches.py). A machine without a GPU brings its own operators and substitutions (kernels.py).
"""

import warnings

import torch

from areal_lite.extensions import cpu_device
from areal_lite.megatron.kernels import kernels
from areal_lite.megatron.patches import install

# Megatron repeats this warning a dozen times. The replacements work, with the repairs in `patches`.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed")
if torch.cuda.is_available():
    install(None)
else:
    _device = cpu_device()
    install(_device.megatron_substitutions())
    _device.install_kernels(kernels)
