"""Hugging Face checkpoints <-> the parameters of a model that is spread over many ranks.

* `stream`: global rank 0 receives every tensor, bucket after bucket, for exports and weight pushes.
  No rank ever holds a copy of the whole model.
* `files`: each rank reads from the safetensors files the slices that it holds, and nothing else;
  buckets become files.

Both use the tables of `architectures`. A round trip returns the same bits.
"""
