"""The papers' figures."""
