"""Notebooks that teach, and what executes them."""
