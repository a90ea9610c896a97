"""Objectives: the losses of areal_lite/algo, assembled into what a training step calls. Pure torch."""
