"""Measurements: ceilings of the device, host cost of launches and replays, kernels."""
