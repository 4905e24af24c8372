"""The papers' tables, reproduced: one module per table."""
