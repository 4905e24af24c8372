"""Claims of the depth paper, one module per part."""
