"""`orthogonalize` against recorded Newton-Schulz results and against the NumPy oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support import goldens, numpy_reference, trees

FILES = ("newton_schulz__mars", "newton_schulz__mars_m")

# Five steps amplify rounding noise in singular values near zero by 3.4445^5, about 485.
ILL_CONDITIONED = ("rank1", "graded")


def _inputs(file, *, without=(), stacks=True):
    """Labels and inputs of a file, in float32 as they were recorded."""
    meta, arrays = goldens.load_newton_schulz(file)
    labels = [
        label
        for label in meta["labels"]
        if label not in without and (stacks or arrays[f"in/{label}"].ndim == 2)
    ]
    return {label: arrays[f"in/{label}"] for label in labels}


def _with_one_norm(stack, eps, **options):
    """Orthogonalizes matrices that are normalised by the norm of the whole stack.

    Here each matrix has a norm of its own; an eps of its own lifts it to that of the stack.
    """
    matrices = stack.reshape(-1, *stack.shape[-2:])
    lift = jnp.linalg.norm(stack) - jnp.linalg.norm(matrices, axis=(1, 2)) + eps
    unit = jax.vmap(lambda m, e: mars_optax.orthogonalize(m, eps=e, **options))(matrices, lift)
    return unit.reshape(stack.shape)


class RecordedNewtonSchulzTest(parameterized.TestCase):
    def assert_agrees(self, file, kinds, inputs, *, rtol, atol, relative=True, **options):
        """Compares with the recorded results of these kinds, for all numbers of steps."""
        meta, arrays = goldens.load_newton_schulz(file)

        @jax.jit
        def results(inputs, steps):
            def of(x):
                if x.ndim > 2:
                    return _with_one_norm(x, meta["eps"], steps=steps, **options)
                return mars_optax.orthogonalize(x, eps=meta["eps"], steps=steps, **options)

            return jax.tree.map(of, inputs)

        compared = 0
        for steps in meta["steps"]:
            actual = results(inputs, steps)
            for kind, label in itertools.product(kinds, inputs):
                expected = arrays.get(f"out_{kind}/{steps}/{label}")
                if expected is None:
                    continue
                compared += 1
                what = f"{kind} {label}, {steps} steps"
                if relative:
                    goldens.assert_close(actual[label], expected, rtol=rtol, atol=atol, what=what)
                else:
                    np.testing.assert_allclose(
                        actual[label], expected, rtol=rtol, atol=atol, err_msg=what
                    )
        self.assertGreaterEqual(compared, len(kinds) * len(inputs))

    @parameterized.parameters(*FILES)
    def test_float64_agrees_with_the_recorded_result(self, file):
        with trees.float64():
            inputs = {label: x.astype(np.float64) for label, x in _inputs(file).items()}
            self.assert_agrees(file, ("f64",), inputs, rtol=0, atol=1e-10, dtype="float64")

    @parameterized.parameters(*FILES)
    def test_float32_agrees_with_the_recorded_result(self, file):
        self.assert_agrees(
            file,
            ("f32",),
            _inputs(file, without=ILL_CONDITIONED),
            rtol=1e-5,
            atol=1e-5,
            dtype="float32",
            precision="highest",
        )

    @parameterized.parameters(*FILES)
    def test_bfloat16_agrees_loosely_with_the_recorded_result(self, file):
        self.assert_agrees(
            file,
            ("bf16", "bf16_compiled"),
            # The matrices of a stack share one norm, which leaves their singular values small.
            _inputs(file, without=ILL_CONDITIONED, stacks=False),
            rtol=0,
            atol=0.1,  # the order of roundings alone moves entries by 0.01 to 0.08
            relative=False,
            dtype="bfloat16",
        )


class NewtonSchulzOracleTest(parameterized.TestCase):
    @parameterized.parameters((6, 4), (4, 6), (5, 5), (1, 7), (7, 1))
    def test_transposed_input_gives_the_transposed_result(self, *shape):
        x = np.random.default_rng(0).normal(size=shape)
        with trees.float64():
            straight = mars_optax.orthogonalize(x, dtype="float64")
            turned = mars_optax.orthogonalize(x.T, dtype="float64")
            goldens.assert_close(turned.T, straight, rtol=0, atol=1e-12, what="float64")
        x = x.astype(np.float32)
        straight = mars_optax.orthogonalize(x, dtype="float32", precision="highest")
        turned = mars_optax.orthogonalize(x.T, dtype="float32", precision="highest")
        goldens.assert_close(turned.T, straight, rtol=0, atol=1e-5, what="float32")

    @parameterized.parameters(1, 2, 7)
    def test_coefficients_of_every_step_are_used_in_their_order(self, steps):
        rng = np.random.default_rng(steps)
        x = rng.normal(size=(4, 6))
        coeffs = np.array([1.9, -1.3, 0.4]) + 0.1 * rng.normal(size=(steps, 3))
        options = {"steps": steps, "coeffs": [tuple(triple) for triple in coeffs], "eps": 0.1}
        with trees.float64():
            actual = mars_optax.orthogonalize(x, dtype="float64", **options)
        expected = numpy_reference.newton_schulz(x, **options)
        goldens.assert_close(actual, expected, rtol=0, atol=1e-12, what=f"{steps} steps")

    def test_no_step_leaves_the_normalised_matrix(self):
        x = np.random.default_rng(0).normal(size=(4, 6))
        with trees.float64():
            actual = mars_optax.orthogonalize(x, steps=0, dtype="float64", eps=0.1)
        expected = x / (np.linalg.norm(x) + 0.1)
        goldens.assert_close(actual, expected, rtol=0, atol=1e-15, what="0 steps")

    def test_one_call_on_a_stack_treats_its_matrices_apart(self):
        x = (
            np.random.default_rng(0).normal(size=(3, 4, 2, 6))
            * np.array([1e-3, 1, 50])[:, None, None, None]
        )
        with trees.float64():
            stack = mars_optax.orthogonalize(
                x, dtype="float64", weight_dimension_numbers=MuonDimensionNumbers(1, 3)
            )
            for i in range(3):
                for j in range(2):
                    one = numpy_reference.newton_schulz(x[i, :, j], eps=1e-7)
                    goldens.assert_close(stack[i, :, j], one, rtol=0, atol=1e-11, what=f"{i}, {j}")


class LowPrecisionTest(absltest.TestCase):
    def test_the_norm_is_taken_before_the_cast(self):
        x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
        actual = mars_optax.orthogonalize(x, steps=0, dtype="bfloat16", eps=0.0)
        expected = jnp.asarray(x / np.linalg.norm(x), jnp.bfloat16)
        np.testing.assert_array_equal(actual, expected.astype(jnp.float32))

    def test_coefficients_are_not_rounded_to_the_dtype_of_the_iteration(self):
        actual = mars_optax.orthogonalize(jnp.ones((1, 1)), steps=1, dtype="bfloat16", eps=0.0)
        # 3.4445 - 4.7750 + 2.0315; of coefficients in bfloat16 it would be 0.6875.
        self.assertEqual(float(actual[0, 0]), float(jnp.bfloat16(0.701)))


if __name__ == "__main__":
    absltest.main()
