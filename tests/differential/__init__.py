"""Where Optax works, this package works: situations times subjects, see `situation.py`."""
