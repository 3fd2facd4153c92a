"""Row normalization: the numbers of its rule, for every layout of leaves and on meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import orthogonalize, partition
from mars_optax._src.leaf import newton_schulz
from mars_optax._src.row_normalization import NormalizeRowsState, normalize_rows
from tests.support import meshes, numpy_reference, trees

# A shape, and its reduction and output axes.
_LAYOUTS = {
    "wide": ((4, 6), MuonDimensionNumbers(0, 1)),
    "tall": ((6, 4), MuonDimensionNumbers(0, 1)),
    "transposed": ((6, 4), MuonDimensionNumbers(1, 0)),
    "stack": ((3, 4, 6), MuonDimensionNumbers(1, 2)),
    "last_is_batch": ((4, 6, 3), MuonDimensionNumbers(1, 0)),
    "convolution": ((2, 3, 4, 5), MuonDimensionNumbers((0, 1, 2), 3)),
    "heads": ((3, 5, 2, 4), MuonDimensionNumbers(1, (2, 3))),
}


def _axes(name: str) -> partition.Axes:
    shape, numbers = _LAYOUTS[name]
    return partition.axes_of_leaf(numbers, shape)


def _stacked(name: str, x: Any) -> np.ndarray:
    """The matrices of a leaf in PyTorch's orientation, (batch, out, in)."""
    axes = _axes(name)
    order = axes.batch + axes.output + axes.reduction
    batch, fan_in, fan_out = axes.stack_shape(np.shape(x))
    return np.transpose(x, order).reshape(batch, fan_out, fan_in)


def _gradients(name: str, steps: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((steps, *_LAYOUTS[name][0]))


class OracleTest(parameterized.TestCase):
    @parameterized.named_parameters((f"_{name}", name) for name in _LAYOUTS)
    def test_it_is_the_rule_in_float64(self, name: str):
        grads, expected = _gradients(name), []
        nu = np.zeros(_stacked(name, grads[0]).shape[:2])
        for g in grads:
            pairs = [
                numpy_reference.normalize_rows(x, v, b2=0.9, eps=1e-3)
                for x, v in zip(_stacked(name, g), nu, strict=True)
            ]
            nu = np.stack([v for _, v in pairs])
            expected.append(np.stack([x for x, _ in pairs]))
        with trees.float64():
            tx = normalize_rows(0.9, 1e-3, weight_dimension_numbers=_LAYOUTS[name][1])
            state, actual = tx.init(jnp.asarray(grads[0])), []
            for g in grads:
                y, state = tx.update(jnp.asarray(g), state)
                actual.append(_stacked(name, y))
            self.assertEqual(state.nu.ndim, grads[0].ndim)
        flat = _stacked(name, np.broadcast_to(state.nu, grads[0].shape))[..., 0]
        np.testing.assert_allclose(np.stack(actual), np.stack(expected), rtol=1e-12)
        np.testing.assert_allclose(flat, nu, rtol=1e-12)
        self.assertEqual({state.nu.shape[i] for i in _axes(name).reduction}, {1})

    @parameterized.named_parameters(("_wide", (4, 6)), ("_tall", (6, 4)))
    def test_after_mars_m_it_is_the_oracles_row_normalized_mars_m(self, shape: tuple[int, int]):
        rng = np.random.default_rng(1)
        param, grads = rng.standard_normal(shape), rng.standard_normal((5, *shape))
        expected = numpy_reference.mars_leaf(
            param.T, grads.swapaxes(1, 2), rule="mars_m", lr=0.1, row_b2=0.8
        )
        with trees.float64():
            tx = optax.chain(
                mars_optax.scale_by_mars_m(ns_dtype="float64"),
                normalize_rows(0.8),
                optax.scale(-0.1),
            )
            params = jnp.asarray(param)
            state = tx.init(params)
            for g, after in zip(grads, expected.params, strict=True):
                updates, state = tx.update(jnp.asarray(g), state)
                params = optax.apply_updates(params, updates)
                # Rounding in the small singular values grows by 3.4445 at each iteration.
                np.testing.assert_allclose(params, after.T, rtol=1e-9, atol=1e-10)

    def test_the_orthogonalization_as_a_transformation_is_what_mars_m_applies(self):
        # Without momentum, correction and clip nothing else is left of it.
        tree = {"a": jnp.asarray(_gradients("stack")[0], jnp.float32)}
        numbers = _LAYOUTS["stack"][1]
        whole = mars_optax.scale_by_mars_m(
            0.0, max_norm=None, correction="none", weight_dimension_numbers=numbers
        )
        inner = orthogonalize.transformation(
            orthogonalize.Orthogonalization(), newton_schulz.rms_factor, numbers
        )
        expected, _ = whole.update(tree, whole.init(tree))
        actual, state = inner.update(tree, inner.init(tree))
        trees.assert_equal(actual, expected)
        self.assertEqual(state, optax.EmptyState())


class PropertiesTest(parameterized.TestCase):
    @parameterized.named_parameters((f"_{name}", name) for name in _LAYOUTS)
    def test_rows_are_even_after_the_first_step_and_norms_are_kept_at_each(self, name: str):
        tx = normalize_rows(weight_dimension_numbers=_LAYOUTS[name][1])
        grads = _gradients(name).astype(np.float32)
        state = tx.init(jnp.asarray(grads[0]))
        for step, g in enumerate(grads):
            y, state = tx.update(jnp.asarray(g), state)
            before, after = _stacked(name, g), _stacked(name, y)
            norms = [np.linalg.norm(x, axis=(1, 2)) for x in (before, after)]
            np.testing.assert_allclose(*norms, rtol=1e-6)
            # Rows keep their directions.
            cosines = np.sum(before * after, -1)
            cosines /= np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
            np.testing.assert_allclose(cosines, 1, rtol=1e-6)
            rows = np.sqrt(np.mean(after**2, axis=-1))
            spread = rows.max(-1) / rows.min(-1) - 1
            if step == 0:
                np.testing.assert_allclose(spread, 0, atol=1e-5)
            else:
                self.assertTrue(np.all(spread > 1e-2), spread)

    def test_scales_of_rows_and_of_the_matrix(self):
        # eps = 0: then rows of any scale are the same but for the norm of the whole.
        tx = normalize_rows(eps=0.0)
        grads = _gradients("tall").astype(np.float32)
        scales = np.array([1e-3, 1.0, 30.0, 1e4], np.float32)
        outputs = []
        for factor in (np.ones_like(scales), scales):
            state = tx.init(jnp.asarray(grads[0]))
            for g in grads:
                y, state = tx.update(jnp.asarray(g * factor), state)
            outputs.append(np.asarray(y) / np.linalg.norm(y))
        np.testing.assert_allclose(*outputs, rtol=1e-5)

    @parameterized.named_parameters(("_with_eps", 1e-8), ("_without_eps", 0.0))
    def test_zeros_stay_zero_and_wake_up_finite(self, eps: float):
        tx = normalize_rows(eps=eps)
        update = jax.jit(tx.update)
        grads = jnp.asarray(_gradients("wide")[0], jnp.float32)
        dead = grads.at[:, 2].set(0.0)
        state = tx.init(grads)
        for _ in range(3):
            y, state = update(dead, state)
            self.assertTrue(trees.all_finite((y, state)))
            np.testing.assert_array_equal(y[:, 2], 0.0)
        self.assertEqual(state.nu[0, 2], 0.0)
        zeros, after = update(jnp.zeros_like(grads), state)
        np.testing.assert_array_equal(zeros, 0.0)
        self.assertTrue(trees.all_finite(after))
        y, state = update(grads, after)
        self.assertTrue(trees.all_finite((y, state)))
        self.assertTrue(np.all(np.asarray(y[:, 2]) != 0))

    def test_a_nan_stays_in_its_matrix(self):
        numbers = _LAYOUTS["stack"][1]
        tx = normalize_rows(weight_dimension_numbers=numbers)
        grads = jnp.asarray(_gradients("stack")[0], jnp.float32)
        tree = {"a": grads.at[1, 2, 3].set(jnp.nan), "b": grads}
        expected, expected_state = tx.update({"a": grads, "b": grads}, tx.init(tree))
        y, state = tx.update(tree, tx.init(tree))
        self.assertTrue(np.isnan(y["a"][1]).all())
        np.testing.assert_array_equal(np.isnan(state.nu["a"]).sum(), 1)
        for slices in (0, 2):
            np.testing.assert_array_equal(y["a"][slices], expected["a"][slices])
        np.testing.assert_array_equal(y["b"], expected["b"])
        np.testing.assert_array_equal(state.nu["b"], expected_state.nu["b"])
        # It is not forgotten where later gradients are well.
        y, _ = tx.update({"a": grads, "b": grads}, state)
        self.assertTrue(np.isnan(y["a"][1]).all())
        self.assertTrue(trees.all_finite(y["b"]))

    def test_complex_rows_have_real_mean_squares(self):
        x = _gradients("wide")
        x = jnp.asarray(x[0] + 1j * x[1], jnp.complex64)
        tx = normalize_rows()
        y, state = tx.update(x, tx.init(x))
        expected, nu = numpy_reference.normalize_rows(np.asarray(x).T, np.zeros(6), b2=0.95)
        np.testing.assert_allclose(y, expected.T, rtol=1e-5)
        np.testing.assert_allclose(state.nu[0], nu, rtol=1e-5)
        self.assertEqual(state.nu.dtype, jnp.float32)

    @parameterized.product(
        dtype=["bfloat16", "float16", "float32"], nu_dtype=[None, "bfloat16", "float16"]
    )
    def test_types_are_a_fixed_point(self, dtype: str, nu_dtype: str | None):
        tx = normalize_rows(nu_dtype=nu_dtype)
        params = {"a": jnp.zeros((4, 6), dtype)}
        state = tx.init(params)
        trees.assert_same_types(jax.eval_shape(tx.init, params), state)
        self.assertEqual(state.nu["a"].dtype, nu_dtype or jnp.float32)
        updates, new_state = tx.update({"a": jnp.ones((4, 6), dtype)}, state)
        trees.assert_same_types(new_state, state)
        self.assertEqual(updates["a"].dtype, jnp.float32)

    def test_vmap_and_operands(self):
        grads = jnp.asarray(_gradients("wide"), jnp.float32)
        decays = jnp.linspace(0.0, 0.9, len(grads))

        def run(decay: Any, gradient: jax.Array) -> Any:
            tx = normalize_rows(b2=decay)
            _, state = tx.update(gradient[::-1], tx.init(gradient))
            return tx.update(gradient, state)

        actual = jax.jit(jax.vmap(run))(decays, grads)
        for i, (decay, gradient) in enumerate(zip(decays, grads, strict=True)):
            trees.assert_close(
                jax.tree.map(lambda x: x[i], actual),  # noqa: B023
                run(float(decay), gradient),
                rtol=1e-6,
                atol=1e-6,
            )

    def test_it_can_be_differentiated_where_a_row_is_zero(self):
        tx = normalize_rows()
        grads = jnp.asarray(_gradients("wide")[0], jnp.float32).at[:, 2].set(0.0)
        weights = jnp.sin(jnp.arange(24.0).reshape(4, 6))

        def fn(x: jax.Array) -> jax.Array:
            return jnp.sum(weights * tx.update(x, tx.init(x))[0])

        self.assertTrue(trees.all_finite(jax.grad(fn)(grads)))
        self.assertTrue(trees.all_finite(jax.grad(fn)(jnp.zeros_like(grads))))

    @parameterized.parameters((0, 3), (3, 0))
    def test_matrices_without_entries(self, *shape: int):
        tx = normalize_rows()
        y, state = tx.update(jnp.zeros(shape), tx.init(jnp.zeros(shape)))
        self.assertEqual(y.shape, shape)
        np.testing.assert_array_equal(state.nu, np.zeros((1, shape[1])))

    def test_it_takes_part_of_a_tree_and_placeholders(self):
        tx = normalize_rows()
        params = {"a": jnp.ones((4, 6)), "b": optax.MaskedNode()}
        state = tx.init(params)
        updates, state = tx.update(params, state)
        self.assertEqual(jax.tree.structure(updates), jax.tree.structure(params))
        doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
        np.testing.assert_array_equal(doubled.nu["a"], 2 * state.nu["a"])

    def test_wrong_arguments(self):
        with self.assertRaisesRegex(ValueError, "`b2`"):
            normalize_rows(1.0)
        with self.assertRaisesRegex(ValueError, "`eps`"):
            normalize_rows(eps=-1.0)
        with self.assertRaisesRegex(ValueError, "`nu_dtype`"):
            normalize_rows(nu_dtype="float8_e4m3fn")
        tx = normalize_rows()
        with self.assertRaisesRegex(ValueError, r"`normalize_rows` expected a matrix"):
            tx.init(jnp.zeros(3))
        with self.assertRaisesRegex(TypeError, "`state`"):
            tx.update(jnp.zeros((2, 2)), optax.EmptyState())


_SHAPES = {
    "batch": (4, 8, 16),
    "rows": (16, 8),
    "columns": (16, 8),
    "both": (16, 8),
    "half": (16, 8),
    "heads": (8, 8, 4),
    "whole": (8, 4),
}
_NUMBERS = {
    "batch": MuonDimensionNumbers(1, 2),
    "rows": MuonDimensionNumbers(0, 1),
    "columns": MuonDimensionNumbers(0, 1),
    "both": MuonDimensionNumbers(0, 1),
    "half": MuonDimensionNumbers(0, 1),
    "heads": MuonDimensionNumbers(0, (1, 2)),
    "whole": MuonDimensionNumbers(0, 1),
}
_SPECS = {
    "batch": P("y", "x"),
    "rows": P(("x", "y")),  # divided along their length
    "columns": P(None, ("x", "y")),
    "both": P("x", "y"),
    "half": P("x"),
    "heads": P("x", "y", None),
    "whole": P(),
}
# One number for each row, which lies where the row does.
_NU_SPECS = {
    "batch": P("y"),
    "rows": P(),
    "columns": P(None, ("x", "y")),
    "both": P(None, "y"),
    "half": P(),
    "heads": P(None, "y"),
    "whole": P(),
}


def _tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in _SHAPES.items()}


def _steps(tx: Any, grads: Any, state: Any, **extra: Any) -> Any:
    for gradient in grads:
        updates, state = tx.update(gradient, state, **extra)
    return updates, state


class MeshTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.tx = normalize_rows(weight_dimension_numbers=_NUMBERS)
        self.grads = [_tree(1), _tree(2)]
        self.expected = _steps(self.tx, self.grads, self.tx.init(_tree(0)))

    @parameterized.named_parameters(("_auto", AxisType.Auto), ("_explicit", AxisType.Explicit))
    def test_on_a_mesh_as_on_one_device(self, axis_type: AxisType):
        mesh = meshes.mesh(axis_type)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _SPECS)
        with jax.set_mesh(mesh):
            params, *grads = jax.device_put([_tree(0), *self.grads], [shardings] * 3)
            state = jax.jit(self.tx.init)(params)
            actual = jax.jit(lambda g, s: _steps(self.tx, g, s))(grads, state)
            # Sums in another order.
            trees.assert_close(actual, self.expected, rtol=1e-5, atol=1e-6)
            for kept in (state.nu, actual[1].nu):
                for name, x in kept.items():
                    wanted = NamedSharding(mesh, _NU_SPECS[name])
                    self.assertTrue(
                        x.sharding.is_equivalent_to(wanted, x.ndim), f"{name}: {x.sharding}"
                    )
            for name, x in actual[0].items():
                self.assertTrue(x.sharding.is_equivalent_to(shardings[name], x.ndim), name)

    @parameterized.named_parameters(
        ("_checked", True, False),
        ("_checked_from_init", True, True),
        ("_unchecked", False, False),
        ("_unchecked_from_init", False, True),
    )
    def test_in_a_shard_map_with_specs(self, check_vma: bool, inside: bool):
        # A state made inside varies, by its type, as its parameter does: only its values return.
        def run(params: Any, state: Any, *grads: Any) -> Any:
            state = self.tx.init(params) if inside else state
            updates, state = _steps(self.tx, grads, state, param_specs=_SPECS)
            return (updates, None if inside else state)

        state_specs = NormalizeRowsState(_NU_SPECS)
        mapped = jax.jit(
            jax.shard_map(
                run,
                mesh=meshes.mesh(AxisType.Auto),
                in_specs=(_SPECS, state_specs, _SPECS, _SPECS),
                out_specs=(_SPECS, None if inside else state_specs),
                check_vma=check_vma,
            )
        )
        args = (_tree(0), self.tx.init(_tree(0)), *self.grads)
        expected = (self.expected[0], None) if inside else self.expected
        trees.assert_close(mapped(*args), expected, rtol=1e-5, atol=1e-6)

    def test_in_a_shard_map_without_specs_it_is_an_error(self):
        mapped = jax.shard_map(
            lambda g: self.tx.update(g, self.tx.init(g))[0],
            mesh=meshes.mesh(AxisType.Auto),
            in_specs=(_SPECS,),
            out_specs=_SPECS,
        )
        with self.assertRaisesRegex(ValueError, r"leaf 'batch' varies.*a row.*param_specs=specs"):
            mapped(_tree(0))


if __name__ == "__main__":
    absltest.main()
