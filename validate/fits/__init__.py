"""Power-law fits of measured losses: solver, intervals, verdict, comparison, and the reading of tables."""
