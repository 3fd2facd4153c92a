"""Pallas kernels and what launches them, which only `execute.py` imports."""
