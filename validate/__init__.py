"""Theory and simulation side by side: ledger, tables, figures and the command."""
