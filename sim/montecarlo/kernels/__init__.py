"""Numba kernels: one chunk of draws, plain arrays and a generator in, plain arrays out, nothing of the project."""
