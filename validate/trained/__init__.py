"""Trained models behind the depth paper's tables and figures: which are trained, and what is read off them."""
