"""Monte Carlo estimates: Numba kernels on plain arrays, and wrappers that return `Estimate`."""
