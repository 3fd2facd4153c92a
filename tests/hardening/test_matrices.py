"""Newton-Schulz on matrices that are hard: no rank, no size, spectra and scales at the ends.

The iteration maps each singular value s of the normalised matrix by the polynomial
p(s) = a s + b s^3 + c s^5 of each step and leaves the singular vectors, which gives the singular
values of the result. In low precision values near 0 are lost in roundings that 5 steps amplify by
3.4445^5, about 485: what holds there is the bound. The quintic's p has its largest value on [0, 1],
1.2023, at 0.5545, and maps [0, 1.2023] into itself.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src.leaf import newton_schulz

DTYPES = ("float32", "bfloat16", "float16")
COEFFS = ("quintic", "polar_express")
# How far roundings move the largest singular value: up to 2e-5, 0.103 and 0.0034 were seen.
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.15, "float16": 0.01}


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def _graded(rows: int, columns: int) -> np.ndarray:
    """Singular values from 1 down to 1e-12, each the same part of the one before."""
    u, _ = np.linalg.qr(_normal(rows, rows))
    v, _ = np.linalg.qr(_normal(columns, rows))
    return u * np.geomspace(1.0, 1e-12, rows) @ v.T


MATRICES: dict[str, Callable[[], np.ndarray]] = {
    "zero": lambda: np.zeros((6, 9)),
    "rank_one": lambda: np.outer(_normal(6), _normal(9)),
    "repeated_rows": lambda: np.repeat(_normal(2, 9), 3, axis=0),
    "one_entry": lambda: np.eye(6, 9) * (np.arange(6) == 2)[:, None],
    "graded": lambda: _graded(6, 9),
    "huge_beside_tiny": lambda: _normal(6, 9) * np.geomspace(1e-6, 1e6, 6)[:, None],
    "orthogonal": lambda: np.linalg.qr(_normal(9, 6))[0].T,
}
SHAPES: dict[str, Callable[[], np.ndarray]] = {
    "one_row": lambda: _normal(1, 9),
    "one_column": lambda: _normal(9, 1),
    "one_by_one": lambda: np.full((1, 1), -3.0),
    "tall": lambda: _normal(8192, 8),
}


def _polynomials(s: np.ndarray, coeffs: str, steps: int = 5) -> np.ndarray:
    """The singular values of the result from those of the normalised matrix."""
    table = newton_schulz.PRESETS[coeffs]
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        s = a * s + b * s**3 + c * s**5
    return s


def _largest(coeffs: str) -> float:
    """What no singular value exceeds, in exact arithmetic."""
    return float(np.max(_polynomials(np.linspace(0.0, 1.0, 200_001), coeffs)))


def _orthogonalized(x: Any, dtype: str, coeffs: str = "quintic", **options: Any) -> np.ndarray:
    result = mars_optax.orthogonalize(
        jnp.asarray(x), dtype=dtype, coeffs=coeffs, precision="highest", **options
    )
    return np.asarray(result, np.float64)


def _singular(x: np.ndarray) -> np.ndarray:
    return np.linalg.svd(x, compute_uv=False)


class SpectrumTest(parameterized.TestCase):
    def test_the_bound_of_the_quintic_is_what_is_told(self):
        grid = np.linspace(0.0, 1.0, 200_001)
        first = _polynomials(grid, "quintic", 1)
        np.testing.assert_allclose([first.max(), grid[first.argmax()]], [1.2023, 0.5545], atol=1e-4)
        further = _polynomials(grid * first.max(), "quintic", 1)
        self.assertLessEqual(further.max(), first.max())
        self.assertGreaterEqual(further.min(), 0.0)
        self.assertLess(_largest("polar_express"), 1.2023)

    @parameterized.product(name=list(MATRICES), dtype=DTYPES, coeffs=COEFFS)
    def test_singular_values_are_bounded(self, name: str, dtype: str, coeffs: str):
        self.check_bounded(MATRICES[name](), dtype, coeffs)

    @parameterized.product(name=list(SHAPES), dtype=("float32", "bfloat16"))
    def test_singular_values_are_bounded_in_any_shape(self, name: str, dtype: str):
        self.check_bounded(SHAPES[name](), dtype, "quintic")

    @parameterized.product(name=list(SHAPES), dtype=DTYPES)
    @pytest.mark.slow
    def test_singular_values_of_the_polar_express_are_bounded_in_any_shape(self, name, dtype):
        self.check_bounded(SHAPES[name](), dtype, "polar_express")

    def check_bounded(self, x: np.ndarray, dtype: str, coeffs: str):
        x = x.astype(np.float32)
        result = _orthogonalized(x, dtype, coeffs)
        self.assertEqual(result.shape, x.shape)
        singular = _singular(result)
        self.assertTrue(np.all(np.isfinite(singular)))
        self.assertLess(singular.max(), _largest(coeffs) + TOLERANCE[dtype])
        # The largest one is far from 0.
        if np.any(x):
            x = x.astype(np.float64)
            start = _singular(x / np.linalg.norm(x)).max()
            reached = _polynomials(np.array(start), coeffs)
            self.assertGreater(singular.max(), reached - TOLERANCE[dtype])

    @parameterized.product(name=list(MATRICES), coeffs=COEFFS)
    def test_float32_follows_the_polynomials(self, name: str, coeffs: str):
        self.check_follows(MATRICES[name](), coeffs)

    @parameterized.parameters(*SHAPES)
    def test_float32_follows_the_polynomials_in_any_shape(self, name: str):
        self.check_follows(SHAPES[name](), "quintic")

    def check_follows(self, x: np.ndarray, coeffs: str):
        x = x.astype(np.float32)
        start = _singular(x.astype(np.float64)) / max(float(np.linalg.norm(x)), 1e-30)
        actual = _singular(_orthogonalized(x, "float32", coeffs))
        # The slopes at 0, 485 and 976 in five steps, amplify what float32 rounds in the first ones.
        slope = {"quintic": 485, "polar_express": 976}[coeffs]
        expected = np.sort(_polynomials(start, coeffs))
        np.testing.assert_allclose(np.sort(actual), expected, rtol=0, atol=4 * slope * 2.0**-24)

    @parameterized.product(dtype=DTYPES, coeffs=COEFFS)
    def test_zeros_stay_zeros(self, dtype: str, coeffs: str):
        for eps in (1e-7, 0.0):
            result = _orthogonalized(np.zeros((6, 9), np.float32), dtype, coeffs, eps=eps)
            np.testing.assert_array_equal(result, 0.0)


class ScaleTest(parameterized.TestCase):
    """The norm is taken in float32, whatever the dtype of the iteration."""

    @parameterized.product(dtype=DTYPES, coeffs=COEFFS)
    def test_the_scale_does_not_matter_between_the_epsilon_and_the_overflow(self, dtype, coeffs):
        x = _normal(6, 9).astype(np.float32)
        expected = _orthogonalized(x, dtype, coeffs, eps=0.0)
        for power in (-50, -20, 20, 60):
            scaled = np.ldexp(x, power)
            # A power of two commutes with every rounding.
            np.testing.assert_array_equal(
                _orthogonalized(scaled, dtype, coeffs, eps=0.0), expected, err_msg=f"2^{power}"
            )

    @parameterized.product(dtype=DTYPES, scale=[1e-30, 1e-12])
    def test_what_is_far_below_the_epsilon_comes_out_small(self, dtype: str, scale: float):
        x = (scale * _normal(6, 9)).astype(np.float32)
        start = _singular(x.astype(np.float64)) / 1e-7
        singular = _singular(_orthogonalized(x, dtype))
        # At 0 the polynomials are a linear map. What float16 cannot hold is 0.
        self.assertLessEqual(singular.max(), 1.05 * 3.4445**5 * start.max())

    @parameterized.product(dtype=DTYPES, scale=[1e20, 1e30])
    def test_what_has_a_norm_that_overflows_becomes_zeros(self, dtype: str, scale: float):
        """As in the clip of a leaf."""
        x = (scale * _normal(6, 9)).astype(np.float32)
        np.testing.assert_array_equal(_orthogonalized(x, dtype), 0.0)

    @parameterized.parameters("bfloat16", "float16")
    def test_matrices_of_low_precision_are_normalised_in_float32(self, dtype: str):
        # Of a norm whose square float16 does not hold, and bfloat16 only coarsely.
        x = jnp.asarray(3e3 * _normal(6, 9), dtype)
        expected = _orthogonalized(x.astype(jnp.float32), "float32")
        actual = _orthogonalized(x, "float32")
        # Rounded once, at the end.
        unit = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=unit)


class IsolationTest(parameterized.TestCase):
    @parameterized.product(dtype=DTYPES, value=[np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_stays_in_its_slice(self, dtype: str, value: float):
        stack = _normal(3, 2, 6, 9).astype(np.float32)
        numbers = {"weight_dimension_numbers": MuonDimensionNumbers(2, 3)}
        expected = _orthogonalized(stack, dtype, **numbers)
        stack[1, 0, 2, 3] = value
        actual = _orthogonalized(stack, dtype, **numbers)
        self.assertTrue(np.any(np.isnan(actual[1, 0])))
        for i, j in ((0, 0), (0, 1), (1, 1), (2, 0), (2, 1)):
            np.testing.assert_array_equal(actual[i, j], expected[i, j], err_msg=f"{i}, {j}")

    @parameterized.parameters(*DTYPES)
    def test_a_slice_that_overflows_or_vanishes_leaves_the_others_alone(self, dtype: str):
        stack = _normal(3, 2, 6, 9).astype(np.float32)
        numbers = {"weight_dimension_numbers": MuonDimensionNumbers(2, 3)}
        expected = _orthogonalized(stack, dtype, **numbers)
        stack[0, 0] *= np.float32(1e30)
        stack[1, 0] *= np.float32(1e-30)
        stack[2, 0] = 0.0
        actual = _orthogonalized(stack, dtype, **numbers)
        np.testing.assert_allclose(actual[:, 0], 0.0, atol=1e-15)
        np.testing.assert_array_equal(actual[:, 1], expected[:, 1])


if __name__ == "__main__":
    absltest.main()
