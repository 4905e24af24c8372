"""Torch modules of the models that the papers train."""
