"""Batch -> loss: pure functions of flat torch tensors, without servers, files or process groups."""
