"""The training loop: batches in, weights and metrics out.

Importing this package prepares `megatron.core` (see `areal_lite.megatron`), before anything can import it.
"""

import areal_lite.megatron  # noqa: F401
