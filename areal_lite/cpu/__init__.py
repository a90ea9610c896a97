"""What exists because a machine has no GPU. device.py is what the core asks for."""

KEPT_LOGITS = 1 << 25
"""Logits that the trainer keeps for backward: 128 MiB in float32."""
