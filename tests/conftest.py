"""Set-up of all tests: eight CPU devices, and slow tests left out unless asked for."""

import jax
import pytest

# Meshes need several devices, and their number is fixed once the first array exists.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config: pytest.Config) -> None:
    """Deselects the slow tests unless the command line has an `-m` of its own."""
    # `-m ''` asks for all tests, and leaves the same empty expression as no `-m` at all.
    given = any(str(argument).startswith("-m") for argument in config.invocation_params.args)
    if not given and not config.option.markexpr:
        config.option.markexpr = "not slow"
