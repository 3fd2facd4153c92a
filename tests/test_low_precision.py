"""The previous gradient in 16 and 8 bits: its types, its error, its scales, its bytes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax
from tests.parity.test_trajectories import QUICKLY
from tests.support import trees

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# The relative error of rounding to nearest: 2^-p for a significand of p bits.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
FACTORIES = ("mars", "mars_lion", "mars_shampoo", "mars_m", "correct_gradients")
PARAMS = {
    "kernel": (4, 6),
    "stack": (2, 3, 4),
    "bias": (5,),
    "scale": (),
    "none": (0,),
    "no_rows": (0, 3),
    "no_columns": (3, 0),
}


def _tree(seed, scale=1.0, dtype="float32", shapes=PARAMS):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), dtype) for name, shape in shapes.items()
    }


def _optimizer(name, **kwargs):
    if name == "correct_gradients":
        return mars_optax.correct_gradients(**kwargs)
    return getattr(mars_optax, name)(0.1, **kwargs)


def _stored(tx, grads):
    """The previous gradient that the state keeps after a step: values, scales, their product."""
    _, state = tx.update(grads, tx.init(grads), grads)
    (values,), (scales,) = trees.fields(state, "prev_grad"), trees.fields(state, "prev_grad_scale")

    def read(value, scale):
        with np.errstate(invalid="ignore"):  # 0 times infinity
            return np.asarray(value, np.float32).astype(np.float64) * np.asarray(scale, np.float64)

    return values, scales, jax.tree.map(read, values, scales)


class TypesTest(parameterized.TestCase):
    @parameterized.product(name=FACTORIES, dtype=["bfloat16", *FLOAT8])
    def test_structure_and_dtypes_are_fixed(self, name, dtype):
        tx = _optimizer(name, prev_grad_dtype=dtype)
        for params_dtype, grads_dtype in itertools.product(("bfloat16", "float32"), repeat=2):
            params, grads = _tree(0, dtype=params_dtype), _tree(1, dtype=grads_dtype)
            state = jax.eval_shape(tx.init, params)

            def scanned(state, params=params, grads=grads):
                return jax.lax.scan(
                    lambda s, _: (tx.update(grads, s, params)[1], None), state, length=2
                )[0]

            updates, new_state = jax.eval_shape(tx.update, grads, state, params)
            trees.assert_same_types(new_state, state)
            trees.assert_same_types(jax.eval_shape(scanned, state), state)
            self.assertEmpty(trees.weak_leaves((updates, new_state)))
            trees.assert_same_types(updates, grads if name == "correct_gradients" else params)
            for leaf in jax.tree.leaves(trees.fields(state, "prev_grad")):
                self.assertEqual(leaf.dtype, dtype)

    @parameterized.parameters(*FACTORIES)
    def test_scales_belong_to_eight_bits_only(self, name):
        for dtype in (None, "float32", "bfloat16", "float16"):
            state = _optimizer(name, prev_grad_dtype=dtype).init(_tree(0))
            self.assertEmpty(trees.fields(state, "prev_grad_scale"))
        for dtype in FLOAT8:
            state = _optimizer(name, prev_grad_dtype=dtype).init(_tree(0))
            (scales,), (values,) = (
                trees.fields(state, field) for field in ("prev_grad_scale", "prev_grad")
            )
            self.assertEqual(jax.tree.structure(scales), jax.tree.structure(values))
            for scale, value in zip(jax.tree.leaves(scales), jax.tree.leaves(values), strict=True):
                rows = (*value.shape[:-1], 1) if value.ndim else ()
                self.assertEqual((scale.shape, scale.dtype), (rows, jnp.float32))
                np.testing.assert_array_equal(scale, 1.0)
                np.testing.assert_array_equal(value.astype(jnp.float32), 0.0)

    @parameterized.parameters(*FLOAT8)
    def test_64_bit_parameters_are_worked_on_in_64_bits(self, dtype):
        with trees.float64():
            tx = mars_optax.correct_gradients(0.1, 0.9, prev_grad_dtype=dtype)  # k = 0.9
            grads = {"w": jnp.asarray([[1.0 + 1e-12, 2.0]])}
            corrected, state = tx.update(grads, tx.init(grads))
            self.assertEqual(corrected["w"].dtype, jnp.float64)
            np.testing.assert_allclose(corrected["w"], 1.9 * grads["w"], rtol=1e-15)
            corrected, _ = tx.update(grads, state)
            # What is stored is read in float32; the gradient keeps its last digits.
            stored = state.prev_grad["w"].astype(jnp.float64) * state.prev_grad_scale["w"]
            np.testing.assert_allclose(
                corrected["w"], grads["w"] + 0.9 * (grads["w"] - stored), rtol=1e-7
            )

    @parameterized.parameters(*FLOAT8)
    def test_types_on_an_explicit_mesh_are_fixed(self, dtype):
        devices = jax.devices("cpu")
        if len(devices) < 8:
            self.skipTest("needs eight CPU devices, which tests/conftest.py asks for")
        mesh = jax.make_mesh(
            (4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=devices[:8]
        )
        tx = mars_optax.scale_by_mars(prev_grad_dtype=dtype)
        with jax.set_mesh(mesh):
            params = jax.device_put({"w": jnp.ones((8, 4))}, NamedSharding(mesh, P("x", "y")))
            state = jax.jit(tx.init)(params)
            _, new_state = jax.jit(tx.update)(params, state)
            self.assertEqual(jax.tree.map(jax.typeof, new_state), jax.tree.map(jax.typeof, state))


class ErrorTest(parameterized.TestCase):
    """What the rounding of the previous gradient does to a run, against its analytical bound."""

    STEPS, GAMMA, B1 = 100, 0.025, 0.95
    K = GAMMA * B1 / (1 - B1)

    def _trajectory(self, tx, noise):
        """Steps on a quadratic with curvatures up to 1: the parameters after each of them."""
        shape = (6, 8)
        rng = np.random.default_rng(0)
        start = {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}
        curvature = jnp.asarray(rng.uniform(0.05, 1.0, size=shape), jnp.float32)
        noises = jnp.asarray(noise * rng.normal(size=(self.STEPS, *shape)), jnp.float32)

        def step(carry, noise):
            params, state = carry
            grads = {"w": curvature * params["w"] + noise}
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params["w"], jnp.linalg.norm(grads["w"]))

        _, (history, norms) = jax.jit(
            functools.partial(jax.lax.scan, step), compiler_options=QUICKLY
        )((start, tx.init(start)), noises)
        return np.asarray(history), np.asarray(norms)

    @parameterized.product(dtype=["bfloat16", *FLOAT8], noise=[0.0, 0.3])
    def test_gradient_descent_strays_by_no_more_than_what_is_added_up(self, dtype, noise):
        """The error of a step is k u |g|, and none grows on a quadratic of small curvature.

        After an error in one step the distance obeys d'' = (1 - (1 + k) lr h) d' + k lr h d; both
        factors are positive and their sum is below 1 for lr h < 1 / (1 + k).
        """
        lr = 0.1
        runs = [
            self._trajectory(
                optax.chain(
                    mars_optax.correct_gradients(self.GAMMA, self.B1, prev_grad_dtype=kept),
                    optax.sgd(lr),
                ),
                noise,
            )
            for kept in (None, dtype)
        ]
        (expected, _), (actual, norms) = runs
        errors = lr * self.K * UNIT_ROUNDOFF[dtype] * np.cumsum(norms)
        strayed = np.linalg.norm(actual - expected, axis=(1, 2))
        # The first gradient is stored after step 1; float32 rounds the parameters, too.
        np.testing.assert_array_less(strayed[1:], errors[:-1] + 1e-5)
        self.assertGreater(strayed[-1], 1e-7)

    @parameterized.parameters("mars", "mars_lion")
    def test_the_fewer_bits_the_larger_the_distance_and_it_stays_small(self, name):
        """In units of the path: u k is the share of the correction, and of c, that is rounded."""

        def run(dtype):
            tx = getattr(mars_optax, name)(0.01, prev_grad_dtype=dtype)
            return self._trajectory(tx, 0.3)[0]

        expected = run(None)
        path = np.sum(np.linalg.norm(np.diff(expected, axis=0), axis=(1, 2)))
        distances = {
            dtype: np.linalg.norm(run(dtype)[-1] - expected[-1]) / path for dtype in UNIT_ROUNDOFF
        }
        for dtype, distance in distances.items():
            self.assertLess(distance, self.K * UNIT_ROUNDOFF[dtype], dtype)
        self.assertLess(distances["bfloat16"], distances["float8_e4m3fn"])


class ScaleTest(parameterized.TestCase):
    @parameterized.parameters(*((dtype, 0.0) for dtype in FLOAT8), ("bfloat16", -1.0))
    def test_derivatives_take_8_bits_for_a_constant(self, dtype, expected):
        """An 8-bit tangent vanishes, and that of the scale alone would be a row's, at one entry."""
        tx = mars_optax.correct_gradients(prev_grad_dtype=dtype)
        grads = _tree(1)
        factor = 0.025 * 0.95 / 0.05

        def second(first):
            corrected, _ = tx.update(grads, tx.update(first, tx.init(grads))[1])
            return sum(jnp.sum(c) for c in jax.tree.leaves(corrected))

        for leaf in jax.tree.leaves(jax.grad(second)(grads)):
            # A cotangent in bfloat16 has its roundoff.
            np.testing.assert_allclose(leaf, np.full(leaf.shape, expected * factor), rtol=2**-8)

    @parameterized.product(dtype=FLOAT8, scale=[1e-30, 1e-6, 1.0, 1e4, 1e30])
    def test_gradients_of_any_size_are_kept_to_the_bits_of_the_dtype(self, dtype, scale):
        grads = _tree(1, scale)
        tx = mars_optax.correct_gradients(prev_grad_dtype=dtype)
        values, _, read = _stored(tx, grads)
        # From the largest number of the dtype, which a row's largest entry becomes, down to
        # the smallest normal one the error is relative; below that, absolute.
        info = jnp.finfo(dtype)
        smallest = float(info.tiny) / float(info.max)
        for leaf, gradient in grads.items():
            exact = np.asarray(gradient, np.float64)
            largest = (
                np.max(np.abs(exact), axis=-1, keepdims=True, initial=0.0)
                if exact.ndim
                else (np.abs(exact))
            )
            bound = UNIT_ROUNDOFF[dtype] * np.maximum(np.abs(exact), smallest * largest)
            # The scale itself is rounded to float32.
            np.testing.assert_array_less(
                np.abs(read[leaf] - exact), bound * (1 + 1e-5) + 1e-45, err_msg=leaf
            )
            self.assertEqual(read[leaf].shape, exact.shape)
        self.assertTrue(bool(jnp.all(jnp.abs(values["kernel"].astype(jnp.float32)) > 0)))

    @parameterized.parameters(*FLOAT8)
    def test_the_largest_entry_of_a_row_is_kept_to_the_last_bit_of_the_scale(self, dtype):
        grads = _tree(1, 1e-3)
        _, scales, read = _stored(mars_optax.correct_gradients(prev_grad_dtype=dtype), grads)
        for leaf in ("kernel", "stack", "bias"):
            exact = np.asarray(grads[leaf])
            index = np.argmax(np.abs(exact), axis=-1, keepdims=True)
            ours, theirs = (np.take_along_axis(x, index, -1) for x in (read[leaf], exact))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        np.testing.assert_allclose(read["scale"], grads["scale"], rtol=1e-6)
        self.assertEqual(scales["scale"].shape, ())

    @parameterized.product(dtype=FLOAT8, scale=[1e-6, 1e-12])
    def test_tiny_gradients_do_not_underflow_in_the_correction(self, dtype, scale):
        """Cast without a scale they would be 0, and c the first step's (1 + k) g for ever."""
        tx = mars_optax.correct_gradients(0.1, 0.9, prev_grad_dtype=dtype)  # k = 0.9
        grads = _tree(1, scale)
        _, state = tx.update(grads, tx.init(grads))
        corrected, _ = tx.update(grads, state)
        for leaf in ("kernel", "bias", "scale"):
            np.testing.assert_array_equal(grads[leaf].astype(dtype).astype(jnp.float32), 0.0)
            error = np.abs(np.asarray(corrected[leaf] - grads[leaf]))
            largest = np.max(np.abs(grads[leaf]))
            self.assertLess(np.max(error), 0.95 * UNIT_ROUNDOFF[dtype] * largest)

    @parameterized.parameters(*FLOAT8)
    def test_rows_of_zeros_stay_zeros(self, dtype):
        grads = {"kernel": jnp.asarray([[0.0, 0.0, 0.0], [1.0, -2.0, 0.0]]), "scale": jnp.zeros(())}
        tx = mars_optax.correct_gradients(prev_grad_dtype=dtype)
        values, scales, read = _stored(tx, grads)
        np.testing.assert_array_equal(read["kernel"][0], 0.0)
        np.testing.assert_array_equal(read["scale"], 0.0)
        np.testing.assert_array_equal(scales["kernel"][0], 1.0)
        np.testing.assert_array_equal(values["kernel"][1, 2].astype(jnp.float32), 0.0)
        np.testing.assert_allclose(read["kernel"][1], [1.0, -2.0, 0.0], rtol=0.13)

    @parameterized.product(dtype=FLOAT8, bad=[np.nan, -np.inf])
    def test_what_is_not_finite_stays_in_its_row(self, dtype, bad):
        grads = {
            "kernel": jnp.asarray([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]),
            "other": jnp.ones((2, 3)),
        }
        tx = mars_optax.correct_gradients(0.1, 0.9, prev_grad_dtype=dtype)
        _, _, read = _stored(tx, grads)
        self.assertTrue(np.all(np.isnan(read["kernel"][0])))
        _, state = tx.update(grads, tx.init(grads))
        corrected, _ = tx.update(jax.tree.map(jnp.ones_like, grads), state)
        finite = jax.tree.map(lambda x: np.isfinite(x), corrected)
        np.testing.assert_array_equal(finite["kernel"], [[False] * 3, [True] * 3])
        self.assertTrue(np.all(finite["other"]))

    @parameterized.parameters("scale_by_mars", "correct_gradients")
    def test_a_gradient_beyond_float16_is_kept_as_its_largest_number(self, name):
        """Kept as infinity it would make the next clip's product NaN, for good."""
        tx = getattr(mars_optax, name)(prev_grad_dtype="float16")
        grads = {"x": jnp.array([[7e4, -2.0, -1e9], [jnp.inf, 0.5, jnp.nan]])}
        _, state = tx.update(grads, tx.init(grads))
        expected = np.float16([[65504, -2.0, -65504], [np.inf, 0.5, np.nan]])
        np.testing.assert_array_equal(state.prev_grad["x"], expected)
        finite = jax.tree.map(lambda g: g[:1], grads)
        _, state = tx.update(finite, tx.init(finite))
        direction, _ = tx.update(finite, state)
        self.assertTrue(np.isfinite(direction["x"]).all())

    def test_a_bfloat16_gradient_beyond_float16_is_kept_as_its_largest_number(self):
        """The bound itself, 65504, is 65536 in bfloat16, which float16 has as infinity."""
        tx = mars_optax.correct_gradients(prev_grad_dtype="float16")
        grads = jnp.array([7e4, -1e9, 2.0, jnp.inf, jnp.nan], jnp.bfloat16)
        expected = np.float16([65504, -65504, 2.0, np.inf, np.nan])
        for update in (tx.update, jax.jit(tx.update)):
            _, state = update(grads, tx.init(grads))
            np.testing.assert_array_equal(state.prev_grad, expected)

    @parameterized.parameters(*FLOAT8)
    def test_complex_leaves_are_kept_as_complex_numbers(self, dtype):
        """There is no complex number of 16 bits: such a leaf is stored as without the option."""
        rng = np.random.default_rng(0)
        grads = {
            "complex": jnp.asarray(rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3))),
            "real": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
        }
        for name in ("correct_gradients", "mars", "mars_lion"):
            tx = _optimizer(name, prev_grad_dtype=dtype)
            _, state = tx.update(grads, tx.init(grads), grads)
            (values,) = trees.fields(state, "prev_grad")
            self.assertEqual(values["complex"].dtype, jnp.complex64)
            self.assertEqual(values["real"].dtype, dtype)
            np.testing.assert_array_equal(values["complex"], grads["complex"])


class BytesTest(parameterized.TestCase):
    """`describe` counts what is there, whatever is stored in whatever dtype."""

    def assert_counted(self, tx, params):
        report = mars_optax.describe(params, tx)
        state = tx.init(params)
        total = sum(x.nbytes for x in jax.tree.leaves(state))
        self.assertEqual(report.state_bytes, total)
        counters = sum(x.nbytes for x in jax.tree.leaves(trees.fields(state, "count")))
        self.assertEqual(sum(leaf.state_bytes for leaf in report.leaves) + counters, total)
        return {leaf.path: leaf.state_bytes for leaf in report.leaves}

    @parameterized.product(
        dtypes=list(
            itertools.product(
                (None, "bfloat16", "float32"),
                (None, "bfloat16", "float16"),
                (None, "bfloat16", "float32", *FLOAT8),
            )
        ),
        params_dtype=["float32", "bfloat16"],
    )
    def test_every_combination_of_dtypes_is_counted(self, dtypes, params_dtype):
        mu_dtype, nu_dtype, prev_grad_dtype = dtypes
        params = _tree(0, dtype=params_dtype)
        tx = mars_optax.mars(
            0.1, mu_dtype=mu_dtype, nu_dtype=nu_dtype, prev_grad_dtype=prev_grad_dtype
        )
        owned = self.assert_counted(tx, params)
        mu, nu = jnp.dtype(mu_dtype or params_dtype), jnp.dtype(nu_dtype or "float32")
        previous = jnp.dtype(prev_grad_dtype or params_dtype)
        rows = 4 * 4 if previous.itemsize == 1 else 0  # a float32 scale for each of four rows
        self.assertEqual(
            owned["kernel"], 24 * (mu.itemsize + nu.itemsize + previous.itemsize) + rows
        )
        self.assertEqual(owned["bias"], 5 * (mu.itemsize + nu.itemsize))
        self.assertEqual(owned["none"], 0)

    @parameterized.product(name=FACTORIES, prev_grad_dtype=[None, "bfloat16", *FLOAT8])
    def test_every_optimizer_is_counted(self, name, prev_grad_dtype):
        params = _tree(0)
        owned = self.assert_counted(_optimizer(name, prev_grad_dtype=prev_grad_dtype), params)
        self.assertGreater(owned["kernel"], 0)

    @parameterized.parameters(
        ("mars", {"correction": "exact"}),
        ("mars", {"correction": "exact", "optimize_1d": True}),
        ("mars_m", {"correction": "exact"}),
        ("mars_lion", {"keep_prev_grad": False, "max_norm": None}),
        ("mars", {"prev_grad_dtype": "float8_e4m3fn", "optimize_1d": True, "amsgrad": True}),
        ("correct_gradients", {"correction": "exact"}),
        ("correct_gradients", {"correction": "storm"}),
        ("storm_adamw", {}),
    )
    def test_other_forms_are_counted(self, name, kwargs):
        self.assert_counted(_optimizer(name, **kwargs), _tree(0))


if __name__ == "__main__":
    absltest.main()
