"""What is trained: problem, architecture and starting point, one module per kind of model."""
