"""The ledger: every claim of the papers, and ours, with a check that can fail and a verdict computed from it."""
