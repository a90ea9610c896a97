"""Objectives: the losses of areal_lite/algo, as a training step calls them. Pure torch."""
