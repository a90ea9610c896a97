"""Batch -> loss: pure functions of flat per-token torch tensors. They know no server, no file and no process group."""
