"""Weights from the trainer to the servers, and proofs that both have the same."""
