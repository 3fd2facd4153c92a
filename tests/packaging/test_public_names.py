"""What `import mars_optax` gives, and what it does not load."""

import subprocess
import sys

from absl.testing import absltest

import mars_optax


class PublicNamesTest(absltest.TestCase):
    def test_the_list_is_complete_and_nothing_else_shows(self):
        imported = {
            name
            for name, value in vars(mars_optax).items()
            if getattr(value, "__module__", "").startswith("mars_optax.") and name[0] != "_"
        }
        self.assertCountEqual(mars_optax.__all__, imported)
        self.assertCountEqual(dir(mars_optax), {*imported, "__version__"})
        star: dict = {}
        exec("from mars_optax import *", star)
        self.assertSetEqual(set(star) - {"__builtins__"}, imported)

    def test_it_loads_no_kernels_and_no_other_library(self):
        program = (
            "import sys, jax, optax; before = set(sys.modules); import mars_optax;"
            "print(*set(sys.modules) - before)"
        )
        loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
        self.assertIn("mars_optax._src.fused", loaded)
        others = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
        self.assertLessEqual(others, {"jax", "jaxlib", "numpy", "optax", "mars_optax"})
        for prefix in ("jax.experimental.pallas", "mars_optax._src.kernels.mosaic"):
            self.assertEmpty([name for name in loaded if name.startswith(prefix)])


if __name__ == "__main__":
    absltest.main()
