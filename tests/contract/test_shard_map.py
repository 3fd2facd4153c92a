"""Inside the user's own `jax.shard_map`: the same as outside, or an error, never something else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mars_optax
from tests import registry
from tests.support import interpreter, meshes, trees

_MATRIX, _STACK = optax.contrib.MuonDimensionNumbers(0, 1), optax.contrib.MuonDimensionNumbers(1, 2)
_NUMBERS = {
    "bias": None,
    "half": _MATRIX,
    "layers": _STACK,
    "slices": _STACK,
    "stack": _STACK,
    "tall": _MATRIX,
    "wide": _MATRIX,
}
_SPECS = {
    "bias": P("x"),
    "half": P("x"),
    "layers": P("x"),  # whole matrices, different ones on each device
    "slices": P("y", "x"),  # summed over the axis of "half", and varies over another
    "stack": P(None, "y", "x"),
    "tall": P("x", "y"),
    "wide": P(None, ("x", "y")),
}


def _tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "bias": (32,),
        "half": (16, 8),
        "layers": (4, 8, 16),
        "slices": (4, 8, 16),
        "stack": (3, 8, 16),
        "tall": (16, 8),
        "wide": (8, 32),
    }
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


def _tree_of(entry: registry.Entry, seed: int) -> dict[str, np.ndarray]:
    """The leaves that the entry takes."""
    names = [k for k, axes in _NUMBERS.items() if axes is not None or not entry.only_matrices()]
    return {k: x for k, x in _tree(seed).items() if k in names}


def _make(name: str, **kwargs: Any) -> Any:
    entry = registry.get(name)
    tree = _tree_of(entry, 0)
    if entry.accepts("weight_dimension_numbers"):
        kwargs = {"weight_dimension_numbers": {k: _NUMBERS[k] for k in tree}, **kwargs}
    return entry.precise(**kwargs)


def _train(tx: Any, params: Any, grads: Any, **extra: Any) -> Any:
    state = tx.init(params)
    for gradient in grads:
        updates, state = tx.update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


def _mapped(fn: Any, specs: Any = _SPECS, check_vma: bool = True) -> Any:
    mesh = meshes.mesh(AxisType.Auto)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=check_vma)
    )


class ShardMapTest(parameterized.TestCase):
    @parameterized.named_parameters(
        *registry.select("optimizer", "link", core=True, contracts=["rounding", "shard_map"]),
    )
    def test_with_specs_it_is_the_global_result(self, entry: registry.Entry):
        self._check(entry, check_vma=True)

    @parameterized.named_parameters(
        *registry.select("optimizer", core=True, contracts=["rounding", "shard_map"]),
    )
    def test_with_specs_it_is_the_global_result_unchecked(self, entry: registry.Entry):
        self._check(entry, check_vma=False)

    @parameterized.named_parameters(
        *registry.select(
            contracts=["rounding", "shard_map"],
            where=lambda entry: not entry.core or entry.kind == "direction",
        )
    )
    @pytest.mark.slow
    def test_with_specs_every_setting_has_the_global_result(self, entry: registry.Entry):
        for check_vma in (True, False):
            self._check(entry, check_vma)

    def _check(self, entry: registry.Entry, check_vma: bool) -> None:
        tx, params, grads = _make(entry.name), _tree_of(entry, 0), _tree_of(entry, 1)
        specs = {k: _SPECS[k] for k in params}
        both = lambda g: (g, jax.tree.map(lambda x: -0.5 * x, g))  # noqa: E731
        expected = jax.jit(lambda p, g: _train(tx, p, both(g)))(params, grads)
        train = _mapped(
            lambda p, g: _train(tx, p, both(g), param_specs=specs), specs, check_vma=check_vma
        )
        # Sums over devices are added in another order, and what is stored is rounded to either of
        # two neighbours.
        tolerance = max(entry.tolerance(1e-6), entry.rounding())
        trees.assert_close(train(params, grads), expected, rtol=tolerance, atol=tolerance)

    @parameterized.product(name=["mars", "mars_lion", "mars_m"], check_vma=[True, False])
    def test_without_specs_it_is_an_error_that_names_leaf_and_remedy(self, name, check_vma):
        tx = _make(name)
        over = r"varies over the mesh axes \['x'\]" if check_vma else "may be a part"
        with self.assertRaisesRegex(ValueError, rf"leaf 'half' {over}.*param_specs=specs"):
            _mapped(lambda p, g: _train(tx, p, [g]), check_vma=check_vma)(_tree(0), _tree(1))

    def test_whole_leaves_need_no_specs_where_jax_keeps_track(self):
        tx, params, grads = _make("mars_m"), _tree(0), _tree(1)
        train = _mapped(lambda p, g: _train(tx, p, [g]), specs=P())
        expected = _train(tx, params, [grads])
        trees.assert_close(train(params, grads), expected, rtol=1e-5, atol=1e-5)
        train = _mapped(
            lambda p, g: _train(tx, p, [g], param_specs=P()), specs=P(), check_vma=False
        )
        trees.assert_close(train(params, grads), expected, rtol=1e-5, atol=1e-5)

    def test_whole_leaves_under_pmap(self):
        tx = _make("mars_m")
        params, grads = _tree(0), _tree(1)
        expected = _train(tx, params, [grads])
        replicated = [jax.tree.map(lambda x: jnp.stack([x, x]), t) for t in (params, grads)]
        devices = jax.devices("cpu")[:2]
        step = jax.pmap(
            lambda p, g: _train(tx, p, [jax.lax.pmean(g, "d")], param_specs=P()),
            axis_name="d",
            devices=devices,
        )
        actual = jax.tree.map(lambda x: x[0], step(*replicated))
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_what_reduces_nothing_needs_none(self):
        tx = _make("mars", max_norm=None)
        params, grads = _tree(0), _tree(1)
        train = _mapped(lambda p, g: _train(tx, p, [g]))
        expected = _train(tx, params, [grads])
        trees.assert_close(train(params, grads), expected, rtol=1e-6, atol=1e-6)

    def test_the_clip_of_all_leaves_is_one_reduction_for_each_set_of_axes(self):
        tx = mars_optax.clip_by_leaf_norm(1.0, weight_dimension_numbers=_NUMBERS)
        clip = _mapped(lambda p, g: tx.update(g, tx.init(p), p, param_specs=_SPECS)[0])
        params, grads = _tree(0), _tree(1)
        expected, _ = tx.update(grads, tx.init(params), params)
        trees.assert_close(clip(params, grads), expected, rtol=1e-6, atol=1e-6)
        jaxpr = str(jax.make_jaxpr(clip)(params, grads))
        # Over x for the bias and the half, and for slices that vary over y, too; over y and x for
        # the stack, over x and y for the others.
        self.assertEqual(jaxpr.count(" psum"), 4)

    def test_the_data_axis_of_averaged_gradients_does_not_matter(self):
        tx, params, grads = _make("mars"), _tree(0), _tree(1)
        specs = {k: P("y") if k == "tall" else P() for k in params}

        def on(p: Any, g: Any) -> Any:
            index = jax.lax.axis_index("x").astype(jnp.float32)
            own = jax.tree.map(lambda x: x * (1 + index - 1.5), g)
            return _train(tx, p, [jax.lax.pmean(own, "x")], param_specs=specs)

        actual = _mapped(on, specs=specs)(params, grads)
        expected = _train(tx, params, [grads])
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_gradients_that_were_not_averaged_are_an_error(self):
        tx = _make("mars")

        def on(p: Any, g: Any) -> Any:
            own = jax.tree.map(lambda x: x * jax.lax.axis_index("x").astype(jnp.float32), g)
            return _train(tx, p, [own])

        with self.assertRaisesRegex(ValueError, r"jax\.lax\.pmean"):
            _mapped(on, specs=P())(_tree(0), _tree(1))

    def test_a_spec_with_too_many_parts_is_an_error(self):
        tx = _make("mars")
        specs = {**_SPECS, "tall": P("x", "y", None)}
        with self.assertRaisesRegex(ValueError, r"`param_specs`.*at most 2 parts for leaf 'tall'"):
            _mapped(lambda p, g: _train(tx, p, [g], param_specs=specs))(_tree(0), _tree(1))

    # SOAP refuses at `init`; of a preconditioner of the user's, only that could say it.
    @parameterized.named_parameters(
        *registry.select(
            where=lambda entry: (
                "shard_map" in entry.skips
                and not entry.skips["shard_map"].startswith("`init`")
                and entry.factory is not mars_optax.variance_reduced
            )
        ),
    )
    def test_what_works_on_whole_leaves_says_so(self, entry: registry.Entry):
        tx = entry.make()
        with self.assertRaisesRegex(NotImplementedError, "inside a shard_map: expected whole"):
            _mapped(lambda p, g: _train(tx, p, [g], param_specs=_SPECS))(_tree(0), _tree(1))

    @interpreter.always()
    def test_a_fused_step_takes_them(self):
        tx, params, grads = _make("mars", implementation="pallas"), _tree(0), _tree(1)
        updates, _ = _make("mars").update(grads, _make("mars").init(params), params)
        step = _mapped(
            lambda p, g: mars_optax.fused_step(tx, g, tx.init(p), p, param_specs=_SPECS)[0],
            check_vma=False,
        )
        expected = optax.apply_updates(params, updates)
        trees.assert_close(step(params, grads), expected, rtol=1e-6, atol=1e-6)

    def test_outside_a_shard_map_they_change_nothing(self):
        tx, params, grads = _make("mars"), _tree(0), _tree(1)
        trees.assert_equal(
            _train(tx, params, [grads], param_specs=_SPECS), _train(tx, params, [grads])
        )


if __name__ == "__main__":
    absltest.main()
