"""Claims of the multi-head paper, one module per part."""
