"""`init`: abstract, jitted, mapped over by `optax.tree.map_params`; the documented state fields."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees

_CORE_FIELDS = {
    "scale_by_mars": ("ScaleByMarsState", ("count", "mu", "nu", "prev_grad")),
    "scale_by_mars_lion": ("ScaleByMarsLionState", ("count", "mu", "prev_grad")),
    "scale_by_mars_shampoo": ("ScaleByMarsShampooState", ("count", "mu", "prev_grad")),
    "scale_by_mars_m": ("ScaleByMarsMState", ("count", "mu", "prev_grad")),
}


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


class InitTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select())
    def test_abstract_init_agrees_with_the_real_one(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        trees.assert_same_types(jax.eval_shape(tx.init, params), tx.init(params))

    @parameterized.named_parameters(*registry.select())
    def test_init_of_shapes_needs_no_arrays(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        trees.assert_same_types(jax.eval_shape(tx.init, shapes), tx.init(params))

    @parameterized.named_parameters(*registry.select())
    def test_init_inside_jit_gives_the_same_state(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        expected = tx.init(params)
        actual = jax.jit(tx.init)(params)
        trees.assert_same_types(actual, expected)
        trees.assert_equal(actual, expected)

    @parameterized.named_parameters(*registry.select())
    def test_a_fresh_state_is_zero(self, entry: registry.Entry):
        state = entry.make().init(entry.params())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            name = trees.path_of(path)
            if "prev_params" in name or "prev_grad_scale" in name:
                continue
            self.assertFalse(bool(jnp.any(leaf != 0)), name)
        for copied in trees.fields(state, "prev_params"):
            for leaf in jax.tree.leaves(copied):
                self.assertTrue(bool(jnp.any(leaf != 0)))

    @parameterized.named_parameters(*registry.select())
    def test_params_copies_are_found_by_tree_map_params(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        state = tx.init(params)
        marked = optax.tree.map_params(
            tx,
            lambda x: x if _is_masked(x) else x + 1,
            state,
            transform_non_params=lambda x: x - 1,
            is_leaf=_is_masked,
        )
        self.assertEqual(jax.tree.structure(marked), jax.tree.structure(state))
        for name, sign in (("mu", 1), ("nu", 1), ("prev_grad", 1), ("count", -1)):
            for leaf in jax.tree.leaves(trees.fields(marked, name)):
                self.assertTrue(bool(jnp.all(leaf == sign)), name)

    @parameterized.named_parameters(*registry.select())
    def test_specs_of_the_params_are_laid_over_the_state(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        paths = jax.tree_util.tree_map_with_path(lambda path, _: trees.path_of(path), params)
        state = optax.tree.map_params(
            tx,
            lambda leaf, path: leaf if _is_masked(leaf) else path,
            tx.init(params),
            paths,
            transform_non_params=lambda _: "",
            is_leaf=_is_masked,
        )
        allowed = {"", *jax.tree.leaves(paths)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            self.assertIn(leaf, allowed)
            self.assertTrue(trees.path_of(path).endswith(leaf), f"{leaf} at {path}")

    @parameterized.named_parameters(
        *registry.select(where=lambda entry: entry.name in _CORE_FIELDS),
    )
    def test_state_is_a_flat_named_tuple_with_the_documented_fields(self, entry):
        type_name, fields = _CORE_FIELDS[entry.name]
        state = entry.make().init(entry.params())
        self.assertEqual(type(state).__name__, type_name)
        self.assertEqual(state._fields[: len(fields)], fields)
        self.assertIs(getattr(mars_optax, type_name), type(state))
        self.assertEqual((state.count.shape, state.count.dtype), ((), jnp.int32))
        for name in fields[1:]:
            self.assertEqual(
                jax.tree.structure(getattr(state, name)), jax.tree.structure(entry.params())
            )

    def test_fields_a_setting_does_not_need_are_none(self):
        params = registry.get("scale_by_mars").params()
        state = mars_optax.scale_by_mars(correction="none").init(params)
        self.assertIsNone(state.prev_grad)
        self.assertIsNotNone(state.nu)

    @parameterized.named_parameters(*registry.select("optimizer", contracts=["vector_rule"]))
    def test_only_the_corrected_leaves_keep_a_previous_gradient(self, entry: registry.Entry):
        params = entry.params()
        kept = trees.shapes(trees.fields(entry.make().init(params), "prev_grad"))
        if not entry.corrects():
            expected = []
        elif entry.kwargs.get("optimize_1d"):
            expected = trees.shapes([params])
        elif entry.tree == "stacked":
            expected = [(3, 4, 5)]
        else:
            expected = [(4, 6), (5, 4)]
        self.assertEqual(kept, expected)

    # What a preconditioner of the user's keeps is for that to say.
    @parameterized.named_parameters(
        *registry.select("optimizer", where=lambda entry: "inner" not in entry.kwargs)
    )
    def test_every_leaf_has_one_momentum(self, entry: registry.Entry):
        params = entry.params()
        momenta = trees.shapes(trees.fields(entry.make().init(params), "mu"))
        self.assertEqual(momenta, trees.shapes([params]))


if __name__ == "__main__":
    absltest.main()
