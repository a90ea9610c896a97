"""The floating-point operations of training, and the share of the GPUs' peak that they use.

Counted are products of matrices: weights, attention and the output layer. A prefix that sequences
share counts once. Backward takes twice as many operations as forward, or as many for weights that
stay as they are. Not counted: recomputing, norms, adapters.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from areal_lite.data import model_folder
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.parameters import head_dim, query_dim

# Words of a GPU's name -> its operations a second in bfloat16 without sparsity, by NVIDIA's data
# sheet of that product. The first row counts whose words are all in the name.
_PCIE = {"H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "L40S": 362e12}
PEAKS = _PCIE | {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}


class Operations:
    """The operations of a model by its checkpoint in `folder`, on all ranks of the model together.

    has_head: it has an output layer; frozen: its weights do not change.
    """

    def __init__(self, hf: PretrainedConfig, folder: Path, *, has_head: bool, frozen: bool):
        self._weight_passes = 2 if frozen else 3
        self._row = 2.0 * hf.hidden_size * hf.vocab_size if has_head else 0.0
        self._token = 2.0 * _weights_of_token(hf, folder)
        # For each token and each token that it sees, by window, in all layers together.
        self._pair: Counter[int] = Counter()
        widths = query_dim(hf) + getattr(hf, "v_head_dim", head_dim(hf))
        for is_net, has_window in zip(model_folder.has_delta_net(hf), model_folder.has_window(hf)):
            if is_net:  # it reads, changes and reads its state
                state = hf.linear_key_head_dim * hf.linear_value_head_dim
                self._token += 6.0 * hf.linear_num_value_heads * state
            else:
                window = hf.sliding_window if has_window else sys.maxsize
                self._pair[window] += 2 * hf.num_attention_heads * widths

    def count(self, microbatches: Sequence[Microbatch], *, backward: bool) -> float:
        """Count the operations of a pass, or of forward and backward."""
        weights = attention = 0.0
        for microbatch in microbatches:
            trie, positions = microbatch.trie, microbatch.position_ids.numpy()
            seen = positions[trie.token] + 1
            scored = np.flatnonzero(microbatch.scored.numpy() & (positions > 0))
            states = np.unique(trie.node[scored - 1])
            weights += self._token * len(seen) + self._row * len(states)
            for window, pair in self._pair.items():
                attention += pair * float(np.minimum(seen, window).sum())
        return weights * self._weight_passes + 3 * attention if backward else weights + attention


def _weights_of_token(hf: PretrainedConfig, folder: Path) -> float:
    """Count the elements of the matrices that a token passes, without the output layer."""
    experts = model_folder.num_experts(vars(hf))
    files, count = model_folder.weight_files(folder), 0.0
    for name, reader in model_folder.open_tensors(files, "numpy").items():
        shape = reader.get_slice(name).get_shape()
        skipped = name == model_folder.EMBEDDING or model_folder.is_optional(name, vars(hf))
        if len(shape) > 1 and not skipped and not name.endswith("bias"):
            share = hf.num_experts_per_tok / experts if ".experts." in name else 1.0
            count += share * math.prod(shape)
    return count


def utilization(operations: float, seconds: float) -> dict[str, float]:
    """Return `mfu`, the share of all ranks' peak that `operations` used; empty if it is unknown."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for words, peak in PEAKS.items():
        if all(word in name for word in words.split()) and "MIG" not in name:
            return {"mfu": operations / (seconds * peak * dist.get_world_size())}
    return {}
