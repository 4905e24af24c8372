"""Everything random: samplers, Monte Carlo kernels and trained models."""
