"""The depth paper: how the loss of linear and softmax attention falls with the number of layers."""
