"""Kernels without a GPU: numpy arrays in and out, compiled by numba, one thread each."""
