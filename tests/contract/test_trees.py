"""Parameter trees of every kind: empty, bare, with `None`, zero-size or complex leaves, classes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests import registry
from tests.support import trees
from tests.support.nodes import CallableDense, Dense, Pair

_WITH_AXES = registry.names(
    "optimizer", core=True, where=lambda entry: entry.accepts("weight_dimension_numbers")
)


def _takes_vectors(entry: registry.Entry) -> bool:
    return entry.tree == "mixed"


def _takes_plain_matrices(entry: registry.Entry) -> bool:
    return entry.tree in ("mixed", "matrices")


def _random(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> jax.Array:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if dtype == "complex64":
        values = values + 1j * rng.standard_normal(shape)
    return jnp.asarray(values, dtype)


class StructureTest(parameterized.TestCase):
    def _check(self, entry: registry.Entry, *trees_of_same_leaves: Any):
        """Trees give their leaves what a list of these leaves gives them."""
        tx, leaves = entry.shared(), jax.tree.leaves(trees_of_same_leaves[0])
        grads = [0.3 * x + 0.1 for x in leaves]
        expected, _, flat_state = trees.run(tx, leaves, [grads, grads])
        for params in trees_of_same_leaves:
            gradient = jax.tree.unflatten(jax.tree.structure(params), grads)
            updates, new_params, state = trees.run(tx, params, [gradient, gradient])
            self.assertEqual(jax.tree.structure(updates), jax.tree.structure(params))
            self.assertEqual(jax.tree.structure(new_params), jax.tree.structure(params))
            self.assertEqual(trees.shapes([state]), trees.shapes([flat_state]))
            trees.assert_close(jax.tree.leaves(updates), expected, rtol=1e-5, atol=1e-6)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_vectors))
    def test_containers_of_every_kind(self, entry: registry.Entry):
        w, b = _random((4, 3)), _random((3,), 1)
        self._check(entry, (w, [b]), Pair(w, {"x": b}), Dense(w, b))

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_vectors))
    def test_modules_that_can_be_called(self, entry: registry.Entry):
        self._check(entry, CallableDense(_random((4, 3)), _random((3,), 1)))

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_plain_matrices))
    def test_none_leaves_stay_none(self, entry: registry.Entry):
        self._check(
            entry,
            {"a": None, "b": Dense(_random((4, 3)), None), "c": [None, _random((2, 3), 1)]},
        )

    @parameterized.named_parameters(*registry.select(where=_takes_plain_matrices))
    def test_an_empty_tree_is_a_tree(self, entry: registry.Entry):
        for params in ({}, (), None, {"a": None}):
            if params is None and (entry.kind == "optimizer" or entry.evaluates()):
                continue  # Optax takes `None` for parameters that were not given
            tx = entry.make()
            state = tx.init(params)
            updates, new_state = tx.update(params, state, params)
            self.assertEqual(updates, params)
            trees.assert_same_types(new_state, state)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_plain_matrices))
    def test_a_bare_array_is_a_tree(self, entry: registry.Entry):
        params, grads = _random((4, 3)), _random((4, 3), 1)
        actual, _, _ = trees.run(entry.shared(), params, [grads, 2 * grads])
        expected, _, _ = trees.run(entry.shared(), {"w": params}, [{"w": grads}, {"w": 2 * grads}])
        np.testing.assert_allclose(actual, expected["w"], rtol=1e-5, atol=1e-6)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_vectors))
    def test_a_bare_scalar_is_a_tree(self, entry: registry.Entry):
        params, grads = jnp.asarray(1.5), jnp.asarray(-0.2)
        updates, _, state = trees.run(entry.shared(), params, [grads, grads])
        self.assertEqual(updates.shape, ())
        self.assertTrue(trees.all_finite((updates, state)))

    @parameterized.named_parameters(
        *registry.select(where=lambda e: _takes_plain_matrices(e) and not e.core)
    )
    @pytest.mark.slow
    def test_zero_size_leaves_in_every_setting(self, entry: registry.Entry):
        self._check_zero_size(entry)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_plain_matrices))
    def test_zero_size_leaves_leave_their_neighbours_alone(self, entry: registry.Entry):
        self._check_zero_size(entry)

    def _check_zero_size(self, entry: registry.Entry):
        empty: dict[str, Any] = {"e1": jnp.zeros((0, 4)), "z1": jnp.zeros((4, 0))}
        if entry.tree == "mixed":
            empty["e2"] = jnp.zeros((0,))
        grads = [entry.grads(step) for step in range(2)]
        updates, params, state = trees.run(
            entry.shared(), {**entry.params(), **empty}, [{**g, **empty} for g in grads]
        )
        expected, _, _ = trees.run(entry.shared(), entry.params(), grads)
        self.assertTrue(trees.all_finite((updates, state)))
        trees.assert_same_types({name: params[name] for name in empty}, empty)
        neighbours = {name: updates[name] for name in expected}
        trees.assert_close(neighbours, expected, rtol=1e-5, atol=1e-6)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_vectors))
    def test_one_dimension_of_one_is_still_a_matrix(self, entry: registry.Entry):
        params = {"column": _random((4, 1)), "row": _random((1, 4)), "dot": _random((1, 1))}
        updates, _, state = trees.run(entry.shared(), params, [params, params])
        self.assertTrue(trees.all_finite((updates, state)))
        if entry.kind == "optimizer" and entry.corrects():
            self.assertLen(jax.tree.leaves(trees.fields(state, "prev_grad")), 3)


class ComplexTest(parameterized.TestCase):
    """Optax's rule: a complex number is one number, and its square is the squared modulus."""

    def test_mars_uses_the_squared_modulus(self):
        params = {"w": _random((4, 3), 0, "complex64")}
        grads = [{"w": _random((4, 3), seed, "complex64")} for seed in (1, 2)]
        tx = mars_optax.scale_by_mars(max_norm=1.0)
        updates, _, state = trees.run(tx, params, grads, apply=False)

        b1, b2, k = 0.95, 0.99, 0.475
        mu = nu = previous = 0.0
        for gradient in grads:
            g = np.asarray(gradient["w"], np.complex128)
            c = g + k * (g - previous)
            c = c / max(1.0, np.linalg.norm(c))
            mu, nu, previous = b1 * mu + (1 - b1) * c, b2 * nu + (1 - b2) * np.abs(c) ** 2, g
        expected = mu / (1 - b1**2) / (np.sqrt(nu / (1 - b2**2)) + 1e-8)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.nu["w"], nu, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(state.mu["w"], mu, rtol=1e-5, atol=1e-7)

    def test_mars_agrees_with_the_chain_of_optax(self):
        params = {"w": _random((4, 3), 0, "complex64"), "b": _random((3,), 5, "complex64")}
        grads = [
            {"w": _random((4, 3), seed, "complex64"), "b": _random((3,), -seed + 9, "complex64")}
            for seed in (1, 2, 3)
        ]
        chain = optax.chain(
            mars_optax.correct_gradients(0.025, 0.95), optax.scale_by_adam(0.95, 0.99)
        )
        actual, _, _ = trees.run(mars_optax.scale_by_mars(max_norm=None), params, grads)
        expected, _, _ = trees.run(chain, params, grads)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_amsgrad_compares_squared_moduli(self):
        params = {"w": _random((4, 3), 0, "complex64")}
        grads = [optax.tree.scale(s, params) for s in (1.0, 0.01j)]
        setting = {"b2": 0.5, "gamma": 0.0, "max_norm": None}
        tx = mars_optax.scale_by_mars(amsgrad=True, **setting)
        updates, _, state = trees.run(tx, params, grads, apply=False)
        w = np.asarray(params["w"], np.complex128)
        # The largest second moment is the one of step 1; its bias correction that of step 2.
        mu = (0.95 * 0.05 * w + 0.05 * 0.01j * w) / (1 - 0.95**2)
        expected = mu / (np.sqrt(0.5 * np.abs(w) ** 2 / (1 - 0.5**2)) + 1e-8)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5, atol=1e-6)
        trees.assert_same_types(state, jax.eval_shape(tx.init, params))

    def test_the_sign_of_lion_is_the_phase(self):
        params = {"w": _random((4, 3), 0, "complex64")}
        grads = {"w": _random((4, 3), 1, "complex64").at[0, 0].set(0)}
        tx = mars_optax.scale_by_mars_lion()
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        g = np.asarray(grads["w"])
        expected = np.where(g == 0, 0, g / np.where(g == 0, 1, np.abs(g)))
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5, atol=1e-6)

    @parameterized.product(
        name=["scale_by_mars_shampoo", "scale_by_mars_m"],
        shape=[(6, 4), (3, 5), (4, 4)],
        ns_dtype=["float32", "bfloat16"],
    )
    def test_newton_schulz_gives_a_nearly_unitary_matrix(self, name, shape, ns_dtype):
        params = {"w": _random(shape, 0, "complex64")}
        grads = {"w": _random(shape, 1, "complex64")}
        tx = registry.get(name).make(ns_dtype=ns_dtype)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        u, g = np.asarray(updates["w"]), np.asarray(grads["w"])
        self.assertEqual(u.dtype, np.complex64)
        fan_in, fan_out = shape
        scale = (
            np.sqrt(max(1.0, fan_out / fan_in))
            if name == "scale_by_mars_shampoo"
            else 0.2 * np.sqrt(max(shape))
        )
        singular = np.linalg.svd(u / scale, compute_uv=False)
        # The quintic ends between 0.68 and 1.13; half precision moves it by some hundredths.
        np.testing.assert_array_less(0.6, singular)
        np.testing.assert_array_less(singular, 1.25)
        # The singular vectors stay: g^H u is Hermitian and positive.
        product = g.conj().T @ u if fan_in >= fan_out else g @ u.conj().T
        asymmetry = np.abs(product - product.conj().T).max() / np.abs(product).max()
        self.assertLess(asymmetry, 1e-4 if ns_dtype == "float32" else 5e-2)
        self.assertGreater(np.linalg.eigvalsh((product + product.conj().T) / 2).min(), 0)

    @parameterized.named_parameters(*registry.select(core=True, where=_takes_plain_matrices))
    def test_complex_leaves_beside_real_ones(self, entry: registry.Entry):
        params = {"c": _random((4, 3), 0, "complex64"), "r": _random((4, 3), 1)}
        grads = {"c": _random((4, 3), 2, "complex64"), "r": _random((4, 3), 3)}
        tx = entry.shared()
        updates, _, state = trees.run(tx, params, [grads, grads])
        trees.assert_same_types(updates, params)
        trees.assert_same_types(state, jax.eval_shape(tx.init, params))
        self.assertTrue(trees.all_finite((updates, state)))
        real, _, _ = trees.run(tx, {"r": params["r"]}, [{"r": grads["r"]}] * 2)
        np.testing.assert_allclose(updates["r"], real["r"], rtol=1e-5, atol=1e-6)


class DimensionNumbersTest(parameterized.TestCase):
    """How `weight_dimension_numbers` reaches the leaves."""

    @parameterized.parameters(*_WITH_AXES)
    def test_a_callable_sees_the_whole_tree_of_shapes(self, name: str):
        entry, seen = registry.get(name), []

        def specs(params):
            seen.append(jax.tree.map(lambda x: tuple(x.shape), params))
            return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)

        tx, params = entry.precise(weight_dimension_numbers=specs), entry.params()
        state = tx.init(params)
        self.assertNotEmpty(seen)
        updates, _ = jax.jit(tx.update)(entry.grads(), state, params)
        whole = jax.tree.map(lambda x: tuple(x.shape), params)
        for shapes in seen:
            self.assertEqual(shapes, whole)
        expected, _, _ = trees.run(entry.shared(), params, [entry.grads()])
        trees.assert_close(updates, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*_WITH_AXES)
    def test_a_tree_that_can_be_called_is_taken_for_a_tree(self, name: str):
        entry = registry.get(name)
        params = CallableDense(_random((4, 3)), _random((3,), 1))
        specs = CallableDense(MuonDimensionNumbers(0, 1), None)
        grads = jax.tree.map(lambda x: 2 * x, params)
        actual, _, _ = trees.run(
            entry.precise(weight_dimension_numbers=specs), params, [grads, params]
        )
        expected, _, _ = trees.run(entry.shared(), params, [grads, params])
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*_WITH_AXES)
    def test_a_bare_spec_makes_every_leaf_of_rank_two_or_more_a_matrix(self, name: str):
        entry = registry.get(name)
        spec = MuonDimensionNumbers(-2, -1)
        params = {"bias": _random((3,)), "one": _random((4, 3)), "three": _random((3, 4, 3))}
        tx = entry.precise(weight_dimension_numbers=spec)
        explicit = entry.precise(
            weight_dimension_numbers={"bias": None, "one": spec, "three": spec}
        )
        actual, _, _ = trees.run(tx, params, [params, params])
        expected, _, _ = trees.run(explicit, params, [params, params])
        trees.assert_equal(actual, expected)

    @parameterized.parameters(*_WITH_AXES)
    def test_slices_of_a_declared_stack_are_matrices_of_their_own(self, name: str):
        entry = registry.get(name)
        kernels = [_random((4, 3), seed) * (seed + 0.1) for seed in range(3)]
        alone, _, _ = trees.run(entry.shared(), kernels, [kernels, kernels[::-1]])
        for axis, spec in (
            (0, MuonDimensionNumbers(1, 2)),
            (1, MuonDimensionNumbers(0, 2)),
            (2, MuonDimensionNumbers(0, 1)),
        ):
            stack, other = jnp.stack(kernels, axis), jnp.stack(kernels[::-1], axis)
            tx = entry.precise(weight_dimension_numbers={"w": spec})
            updates, _, _ = trees.run(tx, {"w": stack}, [{"w": stack}, {"w": other}])
            np.testing.assert_allclose(
                updates["w"], jnp.stack(alone, axis), rtol=1e-4, atol=1e-5, err_msg=f"{axis=}"
            )

    @parameterized.parameters(*_WITH_AXES)
    def test_several_axes_on_a_side_equal_the_flattened_matrix(self, name: str):
        # An attention kernel (embed, heads, width) is a matrix (embed, heads * width).
        entry = registry.get(name)
        kernel, grads = _random((4, 2, 3)), _random((4, 2, 3), 1)
        tx = entry.precise(weight_dimension_numbers={"w": MuonDimensionNumbers(0, (1, 2))})
        actual, _, _ = trees.run(tx, {"w": kernel}, [{"w": grads}])
        expected, _, _ = trees.run(
            entry.shared(), {"w": kernel.reshape(4, 6)}, [{"w": grads.reshape(4, 6)}]
        )
        np.testing.assert_allclose(
            actual["w"], expected["w"].reshape(4, 2, 3), rtol=1e-5, atol=1e-6
        )

    @parameterized.parameters("mars_shampoo", "mars_m")
    def test_swapped_axes_transpose_everything(self, name: str):
        entry = registry.get(name)
        kernel, grads = _random((4, 6)), _random((4, 6), 1)
        actual, _, _ = trees.run(entry.shared(), {"w": kernel}, [{"w": grads}])
        tx = entry.precise(weight_dimension_numbers={"w": MuonDimensionNumbers(1, 0)})
        swapped, _, _ = trees.run(tx, {"w": kernel.T}, [{"w": grads.T}])
        np.testing.assert_allclose(swapped["w"].T, actual["w"], rtol=1e-4, atol=1e-5)

    @parameterized.parameters("mars", "mars_lion")
    def test_leaves_of_rank_three_are_matrices_by_default(self, name: str):
        params = {"w": _random((2, 3, 4)), "b": _random((3,))}
        state = registry.get(name).make().init(params)
        self.assertEqual(trees.shapes(trees.fields(state, "prev_grad")), [(2, 3, 4)])

    @parameterized.parameters("mars_shampoo", "mars_m")
    def test_leaves_of_rank_three_are_vectors_where_axes_matter(self, name: str):
        params = {"w": _random((2, 3, 4)), "m": _random((3, 2))}
        state = registry.get(name).make().init(params)
        self.assertEqual(trees.shapes(trees.fields(state, "prev_grad")), [(3, 2)])

    @parameterized.parameters(
        *registry.names(
            "optimizer",
            core=True,
            contracts=["vector_rule"],
            where=lambda entry: entry.accepts("learning_rate_1d"),
        )
    )
    def test_a_matrix_may_be_declared_a_vector(self, name: str):
        entry = registry.get(name)
        specs = {
            "embed": None,
            "layer": {"bias": None, "kernel": MuonDimensionNumbers()},
            "scale": None,
        }
        tx = entry.make(weight_dimension_numbers=specs)
        state = tx.init(entry.params())
        self.assertEqual(trees.shapes(trees.fields(state, "prev_grad")), [(4, 6)])


if __name__ == "__main__":
    absltest.main()
