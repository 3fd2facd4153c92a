"""Newton-Schulz on the matrices of many leaves at once, on one device.

Leaves together give what each gives by itself, and the NumPy oracle; which of them share a stack;
what must not spread in one; its size and memory; loops; derivatives, vmap and injected numbers;
and where singular values end, against the polynomial of a number.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax import test_util
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import mesh, orthogonalize, partition, stacks
from mars_optax._src.leaf import newton_schulz
from tests.support import numpy_reference, trees

_FLOAT32 = {"dtype": "float32", "precision": "highest"}

# Shape, axes of the matrices, dtype. All of one pair of sides, 12 and 20, but for the last ones.
_LEAVES: dict[str, tuple[tuple[int, ...], MuonDimensionNumbers, str]] = {
    "wide": ((12, 20), MuonDimensionNumbers(0, 1), "float32"),
    "tall": ((20, 12), MuonDimensionNumbers(0, 1), "float32"),
    "turned": ((12, 20), MuonDimensionNumbers(1, 0), "float32"),
    "stack": ((3, 12, 20), MuonDimensionNumbers(1, 2), "float32"),
    "batch_in_the_middle": ((20, 2, 12), MuonDimensionNumbers(0, 2), "float32"),
    "batch_around": ((2, 12, 3, 20, 2), MuonDimensionNumbers(3, 1), "float32"),
    "heads": ((12, 4, 5), MuonDimensionNumbers(0, (1, 2)), "float32"),
    "kernel": ((2, 2, 5, 12), MuonDimensionNumbers((0, 1, 2), 3), "float32"),
    "complex": ((12, 20), MuonDimensionNumbers(0, 1), "complex64"),
    "half": ((12, 20), MuonDimensionNumbers(0, 1), "float16"),
    "brain": ((20, 12), MuonDimensionNumbers(0, 1), "bfloat16"),
    "square": ((12, 12), MuonDimensionNumbers(0, 1), "float32"),
    "row": ((1, 7), MuonDimensionNumbers(0, 1), "float32"),
    "no_slices": ((0, 12, 20), MuonDimensionNumbers(1, 2), "float32"),
    "no_rows": ((0, 20), MuonDimensionNumbers(0, 1), "float32"),
    "no_columns": ((2, 12, 0), MuonDimensionNumbers(1, 2), "float32"),
}


def _leaf(name: str, seed: int = 0) -> jax.Array:
    shape, _, dtype = _LEAVES[name]
    rng = np.random.default_rng([seed, list(_LEAVES).index(name)])
    x = rng.standard_normal(shape)
    if dtype == "complex64":
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def _axes(name: str) -> partition.Axes:
    shape, spec, _ = _LEAVES[name]
    axes = partition.resolve_axes(
        spec, jax.ShapeDtypeStruct(shape, jnp.float32), partition.matrix_at_rank_2
    )
    assert isinstance(axes, partition.Axes)
    return axes


def _together(names: Sequence[str], **options: Any) -> Callable[[Sequence[jax.Array]], Any]:
    """A function of some leaves, of which each matrix is orthogonalized."""
    options = {"prefix": "", **options}

    def fn(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        return orthogonalize.Orthogonalization(**options)(leaves, [_axes(n) for n in names])

    return fn


def _expected(x: jax.Array, axes: partition.Axes) -> np.ndarray:
    """What the oracle makes of each matrix, in float64."""
    order = axes.batch + axes.reduction + axes.output
    wide = np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)
    parts = np.transpose(wide, order)
    stack = parts.reshape(axes.stack_shape(x.shape))
    result = np.stack([_oracle(matrix) for matrix in stack]) if stack.size else stack
    return np.transpose(result.reshape(parts.shape), np.argsort(order))


def _oracle(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return numpy_reference.newton_schulz(x)
    # The polynomial of the singular values.
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    return (u * _polynomial("quintic", 5, s / np.linalg.norm(x))) @ vh


def _polynomial(preset: str, steps: int, s: np.ndarray) -> np.ndarray:
    """Where the iteration sends singular values, in float64."""
    table = newton_schulz.PRESETS[preset]
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        s = a * s + b * s**3 + c * s**5
    return s


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of the functions that it calls included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for name, value in equation.params.items():
            if (equation.primitive.name, name) == ("mars_optax_stacks", "whole"):
                continue  # what an exported program has in its place
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _equations(inner)


def _primitives(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [e.primitive.name for e in _equations(jax.make_jaxpr(fn)(*args))]


def _one_device() -> Any:
    """As a process with one device would see it: these tests have eight."""
    return mock.patch.object(mesh, "is_one_device", return_value=True)


class TogetherTest(parameterized.TestCase):
    @parameterized.named_parameters(("of_one_device", True), ("of_several_devices", False))
    def test_leaves_together_equal_each_by_itself_and_the_oracle(self, is_one: bool):
        names = list(_LEAVES)
        leaves = [_leaf(name) for name in names]
        fn = _together(names, **_FLOAT32)
        with mock.patch.object(mesh, "is_one_device", return_value=is_one):
            results = jax.jit(fn)(leaves)
        for name, x, y in zip(names, leaves, results, strict=True):
            chex.assert_trees_all_equal_shapes_and_dtypes(y, x)
            # Small dtypes round the result; float32 noise grows by up to 485 in five steps.
            tolerance = {"float16": 2**-10, "bfloat16": 2**-7}.get(_LEAVES[name][2], 2e-5)
            np.testing.assert_allclose(
                *(np.asarray(v).astype(np.complex128) for v in (y, _expected(x, _axes(name)))),
                rtol=tolerance,
                atol=tolerance,
                err_msg=name,
            )
        for name in ("wide", "tall", "batch_around", "kernel"):
            i = names.index(name)
            (alone,) = jax.jit(_together([name], **_FLOAT32))([leaves[i]])
            # A product of a stack may add in another order than that of one matrix.
            np.testing.assert_allclose(results[i], alone, rtol=1e-5, atol=1e-5, err_msg=name)

    def test_bfloat16_together_equals_each_by_itself(self):
        names = ["wide", "tall", "stack", "heads", "brain", "complex"]
        leaves = [_leaf(name) for name in names]
        with _one_device():
            results = jax.jit(_together(names))(leaves)
            for name, x, y in zip(names, leaves, results, strict=True):
                (alone,) = jax.jit(_together([name]))([x])
                self.assertEqual(y.dtype, x.dtype)
                wide, expected = (np.asarray(v).astype(np.complex128) for v in (y, alone))
                # Sums in another order round the other way, and small singular values amplify it:
                # each of the two is some 4 % from the exact result.
                distance = np.linalg.norm(wide - expected) / np.linalg.norm(expected)
                self.assertLess(distance, 4e-2, name)

    def test_an_order_of_the_leaves_orders_the_results(self):
        names = ["wide", "tall", "stack", "batch_in_the_middle", "square", "heads"]
        order = [4, 2, 5, 0, 3, 1]
        leaves = [_leaf(name) for name in names]
        with _one_device():
            straight = jax.jit(_together(names, **_FLOAT32))(leaves)
            permuted = jax.jit(_together([names[i] for i in order], **_FLOAT32))(
                [leaves[i] for i in order]
            )
        for i, y in zip(order, permuted, strict=True):
            np.testing.assert_allclose(y, straight[i], rtol=1e-6, atol=1e-6, err_msg=names[i])

    def test_no_leaf_and_no_matrix(self):
        self.assertEqual(_together([])([]), [])
        tx = mars_optax.scale_by_mars_m()
        state = tx.init({})
        self.assertEqual(tx.update({}, state)[0], {})
        params = {"scalar": jnp.ones(()), "vector": jnp.ones(3)}
        fn = mars_optax.mars_m(0.1)
        self.assertNotIn("dot_general", _primitives(lambda p: fn.update(p, fn.init(p), p), params))


class SharingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("orientations", ["wide", "tall", "turned"], 1),
        ("ranks", ["wide", "stack", "batch_around", "heads", "kernel"], 1),
        ("dtypes", ["wide", "half", "brain"], 1),
        ("real_and_complex", ["wide", "complex"], 2),
        ("shapes", ["wide", "square", "row"], 3),
        ("nothing", ["wide", "no_slices"], 1),
    )
    def test_leaves_of_one_shape_are_one_stack(self, names: list[str], n_stacks: int):
        with _one_device():
            primitives = _primitives(_together(names), [_leaf(name) for name in names])
        self.assertEqual(primitives.count("dot_general"), n_stacks * 5 * 3)

    @parameterized.parameters((True, 1), (False, 5))
    def test_where_nobody_knows_how_leaves_lie_they_are_apart(self, is_known: bool, stacks: int):
        names = ["wide", "turned", "tall", "stack", "stack"]
        leaves = [_leaf(name) for name in names]
        with (
            mock.patch.object(mesh, "is_one_device", return_value=False),
            mock.patch.object(mesh, "has_partitioner", return_value=is_known),
        ):
            primitives = _primitives(_together(names, steps=1), leaves)
        self.assertEqual(primitives.count("dot_general"), stacks * 3)


class IsolationTest(parameterized.TestCase):
    @parameterized.product(value=[np.nan, np.inf], dtype=["float32", "bfloat16"])
    def test_what_is_not_finite_stays_in_its_matrix(self, value: float, dtype: str):
        names = ["wide", "tall", "stack"]
        leaves = [_leaf(name) for name in names]
        with _one_device():
            fn = jax.jit(_together(names, dtype=dtype))
            clean = fn(leaves)
            ill = fn([leaves[0].at[3, 4].set(value), leaves[1], leaves[2].at[1, 5, 6].set(value)])
        self.assertTrue(np.isnan(ill[0]).all())
        self.assertTrue(np.isnan(ill[2][1]).all())
        for actual, expected in (
            (ill[1], clean[1]),
            (ill[2][0], clean[2][0]),
            (ill[2][2], clean[2][2]),
        ):
            np.testing.assert_array_equal(actual, expected)

    def test_a_matrix_of_zeros_stays_one(self):
        x = _leaf("stack").at[1].set(0)
        for eps in (0.0, 1e-7):
            (y,) = _together(["stack"], eps=eps)([x])
            np.testing.assert_array_equal(y[1], np.zeros((12, 20)))
            self.assertGreater(np.abs(y[0]).max(), 0.1)


class BoundTest(parameterized.TestCase):
    @parameterized.parameters(12 * 20, 2 * 12 * 20, 5 * 12 * 20 + 1)
    def test_no_product_is_larger_than_the_bound_and_results_are_the_same(self, largest: int):
        names = ["wide", "tall", "stack", "batch_around", "heads", "square", "no_slices"]
        leaves = [_leaf(name) for name in names]
        fn = _together(names, **_FLOAT32)
        with _one_device():
            expected = jax.jit(fn)(leaves)
            whole = self._largest_product(fn, leaves)
            with mock.patch.object(stacks, "LARGEST", largest):
                # Another function: the first one's jaxpr would be found again.
                bounded = _together(names, **_FLOAT32)
                self.assertLessEqual(self._largest_product(bounded, leaves), largest)
                actual = jax.jit(bounded)(leaves)
        self.assertEqual(whole, (1 + 1 + 3 + 12 + 1) * 12 * 20)
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # sums in another order

    @staticmethod
    def _largest_product(fn: Callable[..., Any], leaves: Sequence[jax.Array]) -> int:
        equations = _equations(jax.make_jaxpr(fn)(leaves))
        return max(e.outvars[0].aval.size for e in equations if e.primitive.name == "dot_general")

    def test_no_leaves_are_joined_beyond_the_bound(self):
        names = ["wide", "tall", "wide"]
        with _one_device(), mock.patch.object(stacks, "LARGEST", 2 * 12 * 20):
            jaxpr = jax.make_jaxpr(_together(names, steps=1))([_leaf(name) for name in names])
        joined = [e for e in _equations(jaxpr) if e.primitive.name == "concatenate"]
        self.assertEqual([e.outvars[0].aval.size for e in joined], [2 * 12 * 20])

    def test_memory_is_a_few_stacks_however_many_steps(self):
        stack = 20 * 128 * 256 * 2
        axes = partition.matrix_at_rank_2(2)
        leaves = [jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)] * 20

        def temporary(steps: int) -> int:
            def fn(leaves: Sequence[jax.Array]) -> list[jax.Array]:
                return orthogonalize.Orthogonalization(steps)(leaves, [axes] * 20)

            with _one_device():
                analysis = jax.jit(fn).lower(leaves).compile().memory_analysis()
            return int(analysis.temp_size_in_bytes)

        five = temporary(5)
        self.assertLess(five, 8 * stack)
        self.assertGreater(five, stack)  # it is measured at all
        self.assertLessEqual(temporary(10), five)

    @parameterized.parameters(("tall", True, 2), ("wide", True, 0), ("tall", False, 0))
    def test_on_a_gpu_tall_matrices_are_turned_behind_barriers(
        self, name: str, is_for_gpus: bool, count: int
    ):
        # Else the momentum of these leaves is computed twice, once in the transposed layout.
        with _one_device(), mock.patch.object(mesh, "is_for_gpus", return_value=is_for_gpus):
            fn = _together([name], implementation="xla")
            primitives = _primitives(fn, [_leaf(name)])
        self.assertEqual(primitives.count("optimization_barrier"), count)
        if count:
            first = primitives.index("optimization_barrier")
            self.assertEqual(primitives[first + 1 : first + 3], ["reshape", "transpose"])
            last = len(primitives) - 1 - primitives[::-1].index("optimization_barrier")
            self.assertEqual(primitives[last - 2 : last], ["transpose", "reshape"])


class StepsTest(parameterized.TestCase):
    @parameterized.parameters((0, 0), (1, 3), (10, 30))
    def test_few_steps_are_written_out(self, steps: int, products: int):
        primitives = _primitives(_together(["wide"], steps=steps), [_leaf("wide")])
        self.assertNotIn("while", primitives)
        self.assertNotIn("scan", primitives)
        self.assertEqual(primitives.count("dot_general"), products)

    @parameterized.parameters(11, np.int64(30))
    def test_many_steps_are_a_loop(self, steps: Any):
        primitives = _primitives(_together(["wide"], steps=steps), [_leaf("wide")])
        self.assertEqual(primitives.count("dot_general"), 3)
        self.assertEqual(primitives.count("while") + primitives.count("scan"), 1)

    def test_steps_that_are_traced_are_a_loop_and_the_same(self):
        x = _leaf("wide")

        def fn(x: jax.Array, steps: Any) -> jax.Array:
            return mars_optax.orthogonalize(x, steps=steps, **_FLOAT32)

        self.assertEqual(_primitives(fn, x, 3).count("while"), 1)
        run = jax.jit(fn)
        for steps in (0, 3, 12):
            np.testing.assert_allclose(
                run(x, steps), fn(x, steps), rtol=1e-5, atol=1e-5, err_msg=f"{steps}"
            )

    def test_injected_numbers_equal_plain_ones(self):
        options = {"ns_steps": 3, "ns_coeffs": (2.0, -1.5, 0.5), "ns_dtype": "float32"}
        params = {"a": _leaf("wide"), "b": _leaf("tall")}
        plain = mars_optax.scale_by_mars_m(**options)
        injected = optax.inject_hyperparams(mars_optax.scale_by_mars_m)(
            **{**options, "ns_coeffs": jnp.asarray(options["ns_coeffs"])}
        )
        state = injected.init(params)
        self.assertContainsSubset({"ns_steps", "ns_coeffs"}, state.hyperparams)
        chex.clear_trace_counter()
        update = jax.jit(chex.assert_max_traces(injected.update, n=1))
        expected = jax.jit(plain.update)(params, plain.init(params))[0]
        trees.assert_close(update(params, state)[0], expected, rtol=1e-5, atol=1e-5)
        # They are operands: other ones need no other program.
        state.hyperparams["ns_steps"] += 1
        plain = mars_optax.scale_by_mars_m(**{**options, "ns_steps": 4})
        expected = jax.jit(plain.update)(params, plain.init(params))[0]
        trees.assert_close(update(params, state)[0], expected, rtol=1e-5, atol=1e-5)


class TransformationsTest(parameterized.TestCase):
    @parameterized.named_parameters(("of_one_device", True), ("of_several_devices", False))
    def test_derivatives_in_both_modes_are_those_of_differences(self, is_one: bool):
        names = ["wide", "tall"]
        with trees.float64(), mock.patch.object(mesh, "is_one_device", return_value=is_one):
            fn = jax.jit(_together(names, steps=3, dtype="float64"))
            leaves = [jnp.asarray(np.asarray(_leaf(n)), jnp.float64) for n in names]
            test_util.check_grads(fn, (leaves,), order=1, modes=("fwd", "rev"))

    def test_a_matrix_of_zeros_has_a_derivative(self):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(mars_optax.orthogonalize(x, steps=1))))(
            jnp.zeros((3, 4))
        )
        self.assertTrue(np.isfinite(gradient).all())

    @parameterized.named_parameters(("of_one_device", True), ("of_several_devices", False))
    def test_vmap_over_optimizers_equals_a_loop(self, is_one: bool):
        grads = {"a": _leaf("wide"), "b": _leaf("tall"), "c": _leaf("wide", seed=1)}
        members = jax.tree.map(lambda x: jnp.stack([x, 2 * x[::-1]]), grads)
        coeffs = jnp.array([[3.0, -3.0, 1.0], [2.0, -1.5, 0.5]])

        def update(grads: Any, coeffs: jax.Array, gamma: jax.Array) -> Any:
            tx = mars_optax.scale_by_mars_m(gamma=gamma, ns_coeffs=coeffs, ns_dtype="float32")
            return tx.update(grads, tx.init(grads))[0]

        gammas = jnp.array([0.0, 0.05])
        with mock.patch.object(mesh, "is_one_device", return_value=is_one):
            together = jax.jit(jax.vmap(update))(members, coeffs, gammas)
            one = jax.jit(update)
            for i in range(2):
                alone = one(jax.tree.map(lambda x, i=i: x[i], members), coeffs[i], gammas[i])
                actual = jax.tree.map(lambda x, i=i: x[i], together)
                trees.assert_close(actual, alone, rtol=1e-5, atol=1e-5)


def _graded() -> tuple[np.ndarray, np.ndarray]:
    """Matrices 32 x 48, and their singular values, down to 1e-3 of the largest."""
    s = np.stack(
        [
            np.geomspace(1, 1e-3, 32),
            np.linspace(1, 1e-3, 32),
            np.r_[1.0, np.full(31, 1e-2)],
            np.r_[np.ones(31), 1e-3],
            np.ones(32),
        ]
    )
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.standard_normal((5, 32, 32)))[0]
    v = np.linalg.qr(rng.standard_normal((5, 48, 32)))[0]
    return (u * s[:, None]) @ np.swapaxes(v, 1, 2), s


# Where the polynomial sends numbers from 1e-3 / sqrt(32) to 1: the first test of the class.
_BOUNDS = {("quintic", 8): (0.68, 1.14), ("polar_express", 9): (0.99, 1.01)}


class SpectrumTest(parameterized.TestCase):
    def test_polar_express_is_the_optimal_composition(self):
        """What makes the coefficients those of Amsel et al.: no table is compared.

        On the interval that the polynomials before leave of [1e-3, 1], whose lower end counts as at
        least 0.024 of the upper one, each has its extremes in turns at the ends and in between, and
        the true ends come out at equal distances from 1.
        """
        low, high = 1e-3, 1.0
        *table, last = newton_schulz.PRESETS["polar_express"]
        self.assertLen(table, 7)
        for i, (a, b, c) in enumerate(table):
            # They are applied to x / 1.01, for the safety of rounding.
            a, b, c = 1.01 * a, 1.01**3 * b, 1.01**5 * c
            root = np.sqrt(9 * b**2 - 20 * a * c)
            turns = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
            x = np.array([max(low, 0.02407327424182761 * high), *turns, high])
            self.assertTrue(np.all(np.diff(x) > 0), i)
            p = a * x + b * x**3 + c * x**5
            np.testing.assert_allclose(p[[0, 1]], p[[2, 3]], rtol=1e-12, err_msg=f"{i}")
            low = a * low + b * low**3 + c * low**5
            high = 2 - low
            np.testing.assert_allclose(p[3], high, rtol=1e-12, err_msg=f"{i}")
        # In the limit 1 is where the polynomial and its first two derivatives are 1, 0 and 0.
        self.assertEqual(last, (15 / 8, -10 / 8, 3 / 8))

    @parameterized.parameters(*_BOUNDS)
    def test_the_bounds_are_those_of_the_polynomial(self, preset: str, steps: int):
        low, high = _BOUNDS[preset, steps]
        ends = _polynomial(preset, steps, np.geomspace(1e-3 / 32**0.5, 1, 100_001))
        self.assertBetween(ends.min(), low, low + 0.01)
        self.assertBetween(ends.max(), high - 0.01, high)

    @parameterized.product(setting=list(_BOUNDS), dtype=["float32", "bfloat16"])
    def test_singular_values_end_where_the_polynomial_sends_them(self, setting, dtype):
        preset, steps = setting
        x, s = _graded()
        y = mars_optax.orthogonalize(
            jnp.asarray(x, jnp.float32),
            steps=steps,
            coeffs=preset,
            dtype=dtype,
            precision="highest",
            weight_dimension_numbers=MuonDimensionNumbers(1, 2),
        )
        actual = np.linalg.svd(np.asarray(y, np.float64), compute_uv=False)
        low, high = _BOUNDS[setting]
        tolerance = 2**-6 if dtype == "bfloat16" else 1e-4  # four roundings of a number near 1
        self.assertGreater(actual.min(), low - tolerance)
        self.assertLess(actual.max(), high + tolerance)
        if dtype == "float32":
            starts = s / np.linalg.norm(s, axis=1, keepdims=True)
            expected = np.sort(_polynomial(preset, steps, starts))
            np.testing.assert_allclose(np.sort(actual), expected, atol=1e-4)


if __name__ == "__main__":
    absltest.main()
