"""Which defects of the package the tests notice: `python -m tests.mutation.run`."""
