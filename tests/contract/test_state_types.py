"""Types of state and updates: nothing drifts, whatever the dtypes of parameters and gradients.

Covers eager calls, `lax.scan`, `lax.cond` and `lax.while_loop`, weak types, the dtypes of stored
moments, the dtype of what is returned, and that it is rounded once.
"""

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PAIRS = tuple(itertools.product(_DTYPES, _DTYPES))
_SOME_PAIRS = (("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64"))


def _types_on(*dtypes: str) -> Any:
    return trees.float64() if "float64" in dtypes else contextlib.nullcontext()


def _state_dtype(entry: registry.Entry, field: str, params_dtype: str) -> Any:
    """The dtype api users are promised for a field of the state."""
    chosen = entry.kwargs.get(f"{field}_dtype")
    if chosen is not None:
        return jnp.dtype(chosen)
    if field == "nu":
        return jnp.promote_types(params_dtype, jnp.float32)
    return jnp.dtype(params_dtype)


class StateTypesTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select())
    def test_types_are_a_fixed_point_of_update_for_all_dtypes(self, entry: registry.Entry):
        tx = entry.make()
        for params_dtype, grads_dtype in _PAIRS if entry.core else _SOME_PAIRS:
            name = f"{params_dtype} parameters, {grads_dtype} gradients"
            with self.subTest(name), _types_on(params_dtype, grads_dtype):
                params, grads = entry.params(params_dtype), entry.grads(0, grads_dtype)
                state = jax.eval_shape(tx.init, params)
                updates, new_state = jax.eval_shape(tx.update, grads, state, params)
                trees.assert_same_types(new_state, state)
                self.assertEmpty(trees.weak_leaves((state, updates)))
                like = params if entry.kind == "optimizer" else grads
                trees.assert_same_types(updates, like)

    @parameterized.named_parameters(*registry.select())
    def test_stored_dtypes_are_the_documented_ones(self, entry: registry.Entry):
        tx = entry.make()
        for params_dtype in _DTYPES:
            with _types_on(params_dtype):
                state = jax.eval_shape(tx.init, entry.params(params_dtype))
                if entry.kind == "optimizer" and "inner" in entry.kwargs:
                    # What a preconditioner of the user's keeps is for that to say.
                    state = state._replace(inner_state=None)
                for field in ("mu", "nu", "prev_grad"):
                    for leaf in jax.tree.leaves(trees.fields(state, field)):
                        self.assertEqual(leaf.dtype, _state_dtype(entry, field, params_dtype))

    @parameterized.named_parameters(*registry.select())
    def test_update_runs_inside_scan_cond_and_while_loop(self, entry: registry.Entry):
        tx = entry.make()
        for params_dtype, grads_dtype in (
            ("float32", "float32"),
            ("bfloat16", "float32"),
            ("float32", "bfloat16"),
            ("float64", "float16"),
        ):
            with _types_on(params_dtype, grads_dtype):
                params, grads = entry.params(params_dtype), entry.grads(0, grads_dtype)

                def advance(state, params=params, grads=grads):
                    return tx.update(grads, state, params)[1]

                def scan(state, advance=advance):
                    return jax.lax.scan(lambda s, _: (advance(s), None), state, length=2)[0]

                def cond(state, advance=advance):
                    return jax.lax.cond(jnp.asarray(True), advance, lambda s: s, state)

                def while_loop(state, advance=advance):
                    return jax.lax.while_loop(
                        lambda carry: carry[1] < 2,
                        lambda carry: (advance(carry[0]), carry[1] + 1),
                        (state, jnp.asarray(0)),
                    )[0]

                # Tracing compares the types; nothing has to be computed.
                state = jax.eval_shape(tx.init, params)
                for loop in (scan, cond, while_loop):
                    trees.assert_same_types(jax.eval_shape(loop, state), state)

    @parameterized.product(
        entry=[entry for _, entry in registry.select(core=True)],
        dtypes=[("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")],
    )
    def test_eager_updates_keep_the_types(self, entry: registry.Entry, dtypes):
        params_dtype, grads_dtype = dtypes
        tx, params = entry.make(), entry.params(params_dtype)
        state = tx.init(params)
        before = jax.tree.map(jax.typeof, state)
        for step in range(2):
            updates, state = tx.update(entry.grads(step, grads_dtype), state, params)
        self.assertEqual(jax.tree.map(jax.typeof, state), before)
        dtype = params_dtype if entry.kind == "optimizer" else grads_dtype
        self.assertEqual({x.dtype for x in jax.tree.leaves(updates)}, {jnp.dtype(dtype)})
        self.assertEmpty(trees.weak_leaves((state, updates)))
        self.assertTrue(trees.all_finite((state, updates)))

    @parameterized.named_parameters(*registry.select(core=True))
    def test_scanned_steps_equal_single_ones(self, entry: registry.Entry):
        tx, params = entry.shared(), entry.params()
        grads = [entry.grads(step) for step in range(3)]
        _, _, expected = trees.run(tx, params, grads, apply=False)

        @jax.jit
        def scanned(state, stacked):
            return jax.lax.scan(lambda s, g: (tx.update(g, s, params)[1], None), state, stacked)[0]

        actual = scanned(tx.init(params), jax.tree.map(lambda *x: jnp.stack(x), *grads))
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

    @parameterized.named_parameters(
        *registry.select("optimizer", core=True, contracts=["tiny_gradients"]),
    )
    def test_half_precision_parameters_move_under_tiny_gradients(self, entry: registry.Entry):
        params = entry.params("bfloat16")
        grads = [entry.grads(step, "float32", scale=1e-5) for step in range(3)]
        updates, moved, _ = trees.run(entry.shared(), params, grads)
        self.assertTrue(trees.all_finite(updates))
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
            self.assertTrue(bool(jnp.any(before != after)))

    @parameterized.named_parameters(*registry.select("direction", "optimizer", core=True))
    def test_count_saturates(self, entry: registry.Entry):
        tx, params = entry.shared(), entry.params()
        state = optax.tree.set(tx.init(params), count=jnp.asarray(2**31 - 1, jnp.int32))
        updates, state = trees.jitted_update(tx)(entry.grads(), state, params)
        self.assertTrue(trees.all_finite(updates))
        for count in trees.fields(state, "count"):
            self.assertEqual(int(count), 2**31 - 1)

    def test_64_bits_are_32_where_jax_has_no_more(self):
        tx = mars_optax.scale_by_mars(mu_dtype="float64", nu_dtype="float64")
        state = jax.eval_shape(tx.init, jnp.ones((2, 3)))
        self.assertEqual((state.mu.dtype, state.nu.dtype), (jnp.float32, jnp.float32))

    def test_an_update_in_bfloat16_is_that_in_float32_rounded_once(self):
        tx = mars_optax.mars(0.3, weight_decay=0.1, mu_dtype="float32", prev_grad_dtype="float32")
        rng = np.random.default_rng(0)
        params, *grads = (jnp.asarray(rng.normal(size=(8, 8)), jnp.bfloat16) for _ in range(3))
        wide_params = params.astype(jnp.float32)
        state, wide_state = tx.init(params), tx.init(wide_params)
        for gradient in grads:
            updates, state = tx.update(gradient, state, params)
            expected, wide_state = tx.update(gradient.astype(jnp.float32), wide_state, wide_params)
            trees.assert_equal(updates, expected.astype(jnp.bfloat16))


if __name__ == "__main__":
    absltest.main()
