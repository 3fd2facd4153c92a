"""What the oldest supported versions lack."""

import inspect

import optax
from absl.testing import absltest


def skip_if_optax_lacks(name: str) -> None:
    """Skips a test of one of the benchmarks' optimizers that the installed Optax cannot build."""
    given = inspect.signature(optax.contrib.muon).parameters
    if "muon" in name and "adam_learning_rate" not in given:
        raise absltest.SkipTest("Muon of Optax 0.2.6 has no rate of its own for AdamW")
