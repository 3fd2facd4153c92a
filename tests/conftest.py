"""Set-up of all tests: eight CPU devices, quick compilation, and slow tests only if asked for."""

import gc
import os
import re
import subprocess
import sys

import jax
import pytest

# Meshes need several devices, and their number is fixed once the first array exists.
jax.config.update("jax_num_cpu_devices", 8)
# Eager steps on meshes queue collectives of many programs: on few cores they can wait for each
# other until XLA ends the process.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# JAX allocates so many objects that the usual 700 between two collections cost a twelfth of the
# time; nearly none of them is garbage, and the memory taken is the same.
gc.set_threshold(50_000, 20, 100)

# Tests compile thousands of programs and run each a few times. With these options of XLA a program
# compiles in a third to a tenth of the time. Names differ between versions, and XLA aborts on one
# it does not know, so another process asks. On a GPU the options stay as they are.
_PROBE = """
import jax
options = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
for name, value in options.items():
    try:
        jax.jit(lambda x: x).lower(0).compile(compiler_options={name: value})
    except Exception:
        continue
    if jax.default_backend() == "cpu":
        print(f"--{name}={str(value).lower()}")
"""


def pytest_configure(config: pytest.Config) -> None:
    """Deselects the slow tests unless the command line has an `-m` of its own."""
    # `-m ''` asks for all tests, and leaves the same empty expression as no `-m` at all.
    given = any(str(argument).startswith("-m") for argument in config.invocation_params.args)
    if not given and not config.option.markexpr:
        config.option.markexpr = "not slow"
    # The workers of pytest-xdist inherit it. `XLA_FLAGS=` in front of the command leaves it out.
    if "XLA_FLAGS" not in os.environ:
        # Where JAX does not start, the tests tell why, and better.
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False
        )
        os.environ["XLA_FLAGS"] = " ".join(probe.stdout.split())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Lets `-k` select by the values of a product or of parameters, whose tests have numbers."""
    values = getattr(getattr(item, "obj", None), "__x_params_repr__", "")
    item.extra_keyword_matches.update(re.findall(r"\w+", values))
