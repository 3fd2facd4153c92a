"""`describe` and `dimension_numbers_by_path`: which leaf gets which rule, and what it costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import linen, nnx
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests import registry
from tests.support import trees
from tests.support.nodes import CallableDense

_MATRIX = ((0,), (1,))


def _axes(specs: Any) -> Any:
    """Specs as pairs of tuples: `0` and `(0,)` mean the same."""

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, MuonDimensionNumbers)

    def of(spec: MuonDimensionNumbers | None) -> Any:
        if spec is None:
            return None
        return tuple(tuple(np.atleast_1d(axes).tolist()) for axes in spec)

    return jax.tree.map(of, specs, is_leaf=is_spec)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class DescribeTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select("optimizer", "direction"))
    def test_bytes_are_those_of_the_state(self, entry: registry.Entry):
        params = entry.params()
        report = mars_optax.describe(params, entry.make())
        state = entry.make().init(params)
        self.assertIs(type(report.state_bytes), int)
        self.assertIs(type(report.param_bytes), int)
        self.assertEqual(report.state_bytes, _bytes(state))
        self.assertEqual(report.param_bytes, _bytes(params))
        # What belongs to no leaf are the counts.
        of_leaves = sum(leaf.state_bytes for leaf in report.leaves)
        counts = _bytes([x for x in jax.tree.leaves(state) if x.dtype == jnp.int32])
        self.assertEqual(of_leaves, report.state_bytes - counts)

    @parameterized.named_parameters(*registry.select("optimizer", "direction"))
    def test_every_leaf_has_a_record_and_a_line(self, entry: registry.Entry):
        params = entry.params()
        report = mars_optax.describe(params, entry.make())
        expected = {
            trees.path_of(path): (leaf.shape, leaf.dtype)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        actual = {leaf.path: (leaf.shape, leaf.dtype) for leaf in report.leaves}
        self.assertEqual(actual, expected)
        table = str(report)
        for leaf in report.leaves:
            (line,) = [line for line in table.splitlines() if line.startswith(leaf.path + " ")]
            self.assertIn(leaf.rule, line)
            self.assertIn(str(leaf.dtype), line)
        self.assertEqual(sum(report.counts.values()), len(expected))
        self.assertIn(str(report.state_bytes), table.replace(",", ""))

    @parameterized.named_parameters(*registry.select("optimizer", "direction"))
    def test_shapes_are_enough(self, entry: registry.Entry):
        params = entry.params()
        abstract = jax.eval_shape(lambda: params)
        self.assertEqual(
            str(mars_optax.describe(abstract, entry.make())),
            str(mars_optax.describe(params, entry.make())),
        )

    @parameterized.named_parameters(
        ("mars", "mars", 2, 2),
        ("mars_optimize_1d", "mars_optimize_1d", 2, 2),
        ("mars_specs", "mars_specs", 1, 2),
        ("mars_lion", "mars_lion", 2, 2),
        ("mars_shampoo", "mars_shampoo", 2, 2),
        ("mars_m", "mars_m", 2, 2),
        ("mars_m_specs", "mars_m_specs", 1, 2),
        ("scale_by_mars_m", "scale_by_mars_m", 2, 0),
    )
    def test_counts_of_the_rules(self, name: str, matrices: int, vectors: int):
        entry = registry.get(name)
        counts = mars_optax.describe(entry.params(), entry.make()).counts
        self.assertEqual(counts.get("matrix", 0), matrices)
        self.assertEqual(counts.get("vector", 0), vectors)
        self.assertEqual(counts.get("frozen", 0), 0)

    def _rules(self, params: Any, tx: optax.GradientTransformation) -> dict[str, str]:
        return {leaf.path: leaf.rule for leaf in mars_optax.describe(params, tx).leaves}

    def test_axes_are_those_of_the_spec(self):
        params = {"w": jnp.ones((3, 4, 5)), "m": jnp.ones((4, 5)), "b": jnp.ones(3)}
        specs = {"w": MuonDimensionNumbers(1, 2), "m": MuonDimensionNumbers(1, 0), "b": None}
        report = mars_optax.describe(params, mars_optax.mars_m(0.1, weight_dimension_numbers=specs))
        axes = {leaf.path: leaf.axes for leaf in report.leaves}
        self.assertEqual(_axes(axes), {"w": ((1,), (2,)), "m": ((1,), (0,)), "b": None})

    @parameterized.parameters("mars", "mars_lion", "mars_shampoo", "mars_m")
    def test_wrappers_are_seen_through(self, name: str):
        entry = registry.get(name)
        params = entry.params()
        plain = {
            "embed": "matrix",
            "layer/bias": "vector",
            "layer/kernel": "matrix",
            "scale": "vector",
        }
        self.assertEqual(self._rules(params, entry.make()), plain)
        chained = optax.chain(optax.clip_by_global_norm(1.0), entry.make(), optax.scale(1.0))
        self.assertEqual(self._rules(params, chained), plain)
        multi = optax.MultiSteps(entry.make(), 3)
        self.assertEqual(self._rules(params, multi), plain)
        self.assertEqual(mars_optax.describe(params, multi).state_bytes, _bytes(multi.init(params)))
        frozen = {**plain, "embed": "frozen"}
        mask = {"embed": False, "layer": True, "scale": True}
        masked = optax.masked(entry.make(), mask)
        self.assertEqual(self._rules(params, masked), frozen)
        partitioned = optax.partition(
            {"train": entry.make(), "freeze": optax.set_to_zero()},
            {"embed": "freeze", "layer": "train", "scale": "train"},
        )
        self.assertEqual(self._rules(params, partitioned), frozen)
        for tx in (masked, partitioned):
            report = mars_optax.describe(params, tx)
            self.assertEqual(report.counts["frozen"], 1)
            self.assertEqual(report.state_bytes, _bytes(tx.init(params)))
            (embed,) = [leaf for leaf in report.leaves if leaf.path == "embed"]
            self.assertEqual(embed.state_bytes, 0)

    def test_a_bare_array_has_no_path(self):
        params = jnp.ones((3, 4))
        (leaf,) = mars_optax.describe(params, mars_optax.mars_m(0.1)).leaves
        self.assertEqual((leaf.path, leaf.rule, leaf.state_bytes), ("", "matrix", 2 * 48))

    def test_a_scalar_does_not_own_the_counters(self):
        params = jnp.asarray(1.0)
        report = mars_optax.describe(params, mars_optax.scale_by_mars())
        (leaf,) = report.leaves
        self.assertEqual((leaf.state_bytes, report.state_bytes), (12, 16))

    def test_an_optimizer_of_another_package_is_refused(self):
        with self.assertRaises(TypeError) as caught:
            mars_optax.describe({"w": jnp.ones((2, 2))}, optax.adam(0.1))
        self.assertIn("tx", str(caught.exception))

    def test_nothing_is_computed_for_large_models(self):
        # A tree whose state would need a terabyte.
        params = {"w": jax.ShapeDtypeStruct((2**18, 2**18), jnp.bfloat16)}
        report = mars_optax.describe(params, mars_optax.mars_m(0.1))
        self.assertGreaterEqual(report.state_bytes, 2 * 2**37)
        self.assertEqual(report.param_bytes, 2**37)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.lm_head = nnx.Linear(4, 5, use_bias=False, rngs=rngs)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(5, 4, name="embed")(tokens)
        x = linen.Dense(4, name="hidden")(x)
        return linen.Dense(5, name="lm_head")(x)


class DimensionNumbersByPathTest(parameterized.TestCase):
    def test_the_first_match_wins(self):
        specs = mars_optax.dimension_numbers_by_path(
            [
                ("embed|lm_head", None),
                (r"attn/kernel", MuonDimensionNumbers(1, 2)),
                # Matches all of the above, too, and comes too late for them.
                (r"kernel|lm_head", MuonDimensionNumbers(0, 2)),
                (r"blocks/.*/(bias|scale)", None),
            ]
        )
        params = {
            "embed": {"kernel": jnp.ones((5, 4))},
            "blocks": {
                "attn": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.ones((3, 4))},
                "norm": {"scale": jnp.ones((3, 4))},
            },
            "lm_head": jnp.ones((4, 5)),
            "final": jnp.ones((4, 4)),
        }
        self.assertEqual(
            _axes(specs(params)),
            {
                "embed": {"kernel": None},
                "blocks": {
                    "attn": {"kernel": ((1,), (2,)), "bias": None},
                    "norm": {"scale": None},
                },
                "lm_head": None,
                "final": _MATRIX,
            },
        )

    def test_defaults(self):
        params = {"m": jnp.ones((2, 3)), "v": jnp.ones(3), "s": jnp.ones((2, 2, 2)), "x": 1.0}
        params["x"] = jnp.asarray(1.0)
        rank2 = mars_optax.dimension_numbers_by_path([("x", None)])
        self.assertEqual(_axes(rank2(params)), {"m": _MATRIX, "v": None, "s": None, "x": None})
        vector = mars_optax.dimension_numbers_by_path([("x", None)], default="vector")
        self.assertEqual(_axes(vector(params)), {"m": None, "v": None, "s": None, "x": None})

    def test_patterns_are_searched_for_anywhere_in_the_path(self):
        specs = mars_optax.dimension_numbers_by_path([("b$", None), ("^a/", None)], "rank2")
        params = {"a": {"x": jnp.ones((2, 2))}, "ba": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        self.assertEqual(_axes(specs(params)), {"a": {"x": None}, "ba": _MATRIX, "b": None})

    def test_abstract_parameters_serve(self):
        specs = mars_optax.dimension_numbers_by_path([("b", None)])
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        self.assertEqual(specs(jax.eval_shape(lambda: params)), specs(params))

    def test_nnx_paths_end_without_value(self):
        specs = mars_optax.dimension_numbers_by_path(
            [
                ("embed|lm_head", None),
                (r"^blocks/\d/attn/kernel$", MuonDimensionNumbers()),
                ("(bias|scale)$", None),
            ],
            default="vector",
        )
        params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
        report = mars_optax.describe(params, mars_optax.mars_m(0.1, weight_dimension_numbers=specs))
        rules = {leaf.path: leaf.rule for leaf in report.leaves}
        self.assertEqual(rules["blocks/0/attn/kernel"], "matrix")
        self.assertEqual(rules["blocks/1/norm/scale"], "vector")
        self.assertEqual(rules["lm_head/kernel"], "vector")
        self.assertEqual(report.counts["matrix"], 2)

    def test_linen_parameters(self):
        params = LinenModel().init(jax.random.key(0), jnp.zeros((2,), jnp.int32))["params"]
        specs = mars_optax.dimension_numbers_by_path([("embed/embedding|lm_head/kernel", None)])
        report = mars_optax.describe(params, mars_optax.mars(0.1, weight_dimension_numbers=specs))
        matrices = [leaf.path for leaf in report.leaves if leaf.rule == "matrix"]
        self.assertEqual(matrices, ["hidden/kernel"])

    def test_modules_that_can_be_called(self):
        params = {
            "head": CallableDense(jnp.ones((3, 2)), None),
            "body": CallableDense(jnp.ones((3, 3)), jnp.ones(3)),
        }
        specs = mars_optax.dimension_numbers_by_path([("head/weight", None)])
        tx = mars_optax.mars_m(0.1, weight_dimension_numbers=specs)
        report = mars_optax.describe(params, tx)
        matrices = [leaf.path for leaf in report.leaves if leaf.rule == "matrix"]
        self.assertEqual(matrices, ["body/weight"])
        updates, _ = tx.update(params, tx.init(params), params)
        self.assertEqual(jax.tree.structure(updates), jax.tree.structure(params))

    @parameterized.parameters("mars", "mars_lion", "mars_shampoo", "mars_m")
    def test_every_optimizer_takes_rules(self, name: str):
        entry = registry.get(name)
        specs = mars_optax.dimension_numbers_by_path([("embed", None)])
        tx, params = entry.make(weight_dimension_numbers=specs), entry.params()
        state = tx.init(params)
        self.assertEqual(trees.shapes(trees.fields(state, "prev_grad")), [(4, 6)])
        _, new_state = jax.jit(tx.update)(entry.grads(), state, params)
        trees.assert_same_types(new_state, state)


if __name__ == "__main__":
    absltest.main()
