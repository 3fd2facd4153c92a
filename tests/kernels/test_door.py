"""The one door to the kernels: the package without their folder."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest

import mars_optax

_ROOT = pathlib.Path(__file__).parents[2]

# Traced, not compiled: what executes a step is chosen before.
_PROGRAM = """
import functools
import importlib.util
import os
import jax
import jax.numpy as jnp
import numpy as np
import optax
import mars_optax
from tests import registry

assert importlib.util.find_spec("mars_optax._src.kernels") is None
seen = set()
for name, entry in registry.select(core=True):
    params, grads = entry.params(), entry.grads()
    refuses = entry.accepts("implementation")
    for options in [{"implementation": x} for x in (None, "xla")] if refuses else [{}]:
        tx = optax.with_extra_args_support(entry.make(**options))
        fused = functools.partial(mars_optax.fused_step, tx)
        state = jax.eval_shape(tx.init, params)
        jax.eval_shape(tx.update, grads, state, params)
        new, _ = jax.eval_shape(fused, grads, state, params)
        assert jax.tree.structure(new) == jax.tree.structure(params), name
    # Also where the interpreter is asked for there are none.
    for value in ("0", "1") if refuses else ():
        os.environ["MARS_OPTAX_PALLAS_INTERPRET"] = value
        tx = entry.make(implementation="pallas")
        try:
            tx.update(grads, tx.init(params), params)
        except NotImplementedError as error:
            assert "`implementation`: expected what can run here, got 'pallas':" in str(error)
            assert "this copy of the package has no kernels (" in str(error), error
            seen.add(entry.factory.__name__)
        else:
            raise AssertionError(f"{name}: kernels that are not there were not refused")
assert seen >= {"mars", "mars_lion", "mars_m", "mars_shampoo", "scale_by_mars"}, seen
tx, params = mars_optax.mars(0.1, weight_decay_1d=0.0), {"x": jnp.ones(3)}
updates, _ = tx.update(params, tx.init(params), params)
np.testing.assert_allclose(updates["x"], -0.1, rtol=1e-5)
"""


class WithoutKernelsTest(absltest.TestCase):
    def test_the_package_runs_and_refuses_kernels_without_their_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(mars_optax.__file__).parent
            shutil.copytree(
                source,
                pathlib.Path(folder, "mars_optax"),
                ignore=shutil.ignore_patterns("kernels", "__pycache__"),
            )
            result = subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"},
                capture_output=True,
                text=True,
            )
        self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
    absltest.main()
