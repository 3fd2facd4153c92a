"""Maths on one array: no trees, no state, no transformations."""
