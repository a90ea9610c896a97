"""Kernels for machines without a GPU: numpy arrays in and out, compiled by numba, one thread each.

* `norms.py`: RMSNorm and rotation, for servers and trainer.
* `paged_attention.py`: the KV cache of a server, and attention over it.
* `packed_attention.py`: attention over packed sequences and its gradient, for the trainer.
* `products.py`: matrix products of torch, by the faster of its two libraries.
* `vectors.py`: vectors of 16 numbers, of which the kernels of attention are made.
"""
