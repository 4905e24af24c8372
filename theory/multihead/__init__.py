"""The multi-head paper: softmax attention as debiased gradient descent."""
