"""The training loop: batches in, weights and metrics out."""
