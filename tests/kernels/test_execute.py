"""Kernels against XLA: sizes, dtypes, factors, values, shards, transformations, refusals."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mars_optax._src import execute
from mars_optax._src.kernels import calls, mosaic_tpu, rewrite, tiling
from mars_optax._src.leaf import precision
from mars_optax._src.leaf.correction import corrected_gradient
from mars_optax._src.leaf.momentum import momentum_step
from mars_optax._src.variants.adamw import adamw_step
from tests.support import interpreter, meshes, trees

_SCALARS = (0.05, 0.01, 1e-3)


def _corrected(grad: Any, prev: Any, factor: Any) -> Any:
    c = corrected_gradient(grad, prev, 0.475)
    return c if factor is None else c * factor


def _adamw(operands: Any, factor: Any, scalars: Any) -> tuple[Any, ...]:
    """A whole step: (grad, prev_grad, mu, nu, param) -> (param, mu, nu)."""
    grad, prev, mu, nu, param = (x.astype(jnp.float32) for x in operands)
    mu_correction, nu_correction, rate = scalars
    direction, mu, nu, _ = adamw_step(
        _corrected(grad, prev, factor),
        grad,
        mu,
        nu,
        None,
        b1=0.95,
        b2=0.99,
        eps=1e-8,
        eps_root=0.0,
        mu_correction=mu_correction,
        nu_correction=nu_correction,
    )
    return param - rate * direction, mu, nu


def _lion(operands: Any, factor: Any, scalars: Any) -> tuple[Any, ...]:
    """Operations that Mosaic GPU has in every JAX that has it: (grad, prev, mu) -> (param, mu)."""
    grad, prev, mu = (x.astype(jnp.float32) for x in operands)
    momentum, mu = momentum_step(_corrected(grad, prev, factor), grad, mu, b1=0.95)
    return -scalars[2] * jnp.sign(momentum), mu


_ALIASES = {0: 4, 1: 2, 2: 3}


def _leaf(
    shape: tuple[int, ...], factor: Any = None, dtypes: Any = ("float32",) * 5, seed: int = 0
) -> execute.Leaf:
    rng = np.random.default_rng([seed, *shape])
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for dtype in dtypes]
    operands[3] = jnp.abs(operands[3])
    if factor is not None:
        factor = jnp.asarray(rng.uniform(0.5, 1.0, factor), jnp.float32)
    outs = (dtypes[4], dtypes[2], dtypes[3])
    return execute.Leaf(tuple(operands), outs, factor, _ALIASES)


def _put(leaf: execute.Leaf, sharding: NamedSharding) -> execute.Leaf:
    return dataclasses.replace(leaf, operands=jax.device_put(leaf.operands, sharding))


def _run(
    leaves: list[execute.Leaf], implementation: str, fn: Any = _adamw, data: Any = None
) -> list[Any]:
    def on(data: Any, scalars: Any) -> list[Any]:
        mine = [
            dataclasses.replace(leaf, operands=operands, factor=factor)
            for leaf, (operands, factor) in zip(leaves, data, strict=True)
        ]
        return execute.elementwise(fn, mine, scalars, implementation)

    data = [(leaf.operands, leaf.factor) for leaf in leaves] if data is None else data
    scalars = tuple(map(jnp.float32, _SCALARS))
    return jax.jit(on)(data, scalars)


_SIZES = (0, 1, 7, 127, 128, 129, 5000, 50257 * 3)


class KernelsTest(parameterized.TestCase):
    @interpreter.elsewhere()
    def test_any_size(self):
        leaves = [_leaf((size,), (1,) if size % 2 else None) for size in _SIZES]
        # The programs differ in what is contracted to one rounding.
        trees.assert_close(_run(leaves, "pallas"), _run(leaves, "xla"), rtol=3e-7, atol=3e-7)

    @interpreter.elsewhere()
    def test_any_shape_and_factor(self):
        cases = [
            ((), ()),
            ((3, 43), (1, 1)),
            ((2, 3, 4, 32), None),
            ((4, 32, 128), (4, 1, 1)),  # rows of blocks
            ((4, 32, 127), (4, 1, 1)),  # rows that end within a block
            ((32, 4, 128), (1, 4, 1)),  # matrices that are not contiguous
            ((2, 3, 16, 8), (2, 3, 1, 1)),
            ((5, 0, 3), (5, 1, 1)),
        ]
        leaves = [_leaf(shape, factor) for shape, factor in cases]
        trees.assert_close(_run(leaves, "pallas"), _run(leaves, "xla"), rtol=3e-7, atol=3e-7)

    @parameterized.parameters(
        ("bfloat16",) * 5,
        ("float32", "bfloat16", "bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32", "float32", "bfloat16"),
        ("float16", "float32", "bfloat16", "float32", "float16"),
    )
    @interpreter.elsewhere()
    def test_any_mix_of_dtypes(self, *dtypes: str):
        leaves = [_leaf((640,), None, dtypes), _leaf((37, 64), (1, 1), dtypes)]
        actual, expected = _run(leaves, "pallas"), _run(leaves, "xla")
        trees.assert_same_types(actual, expected)
        # A last place of the narrowest dtype, where sums differ before they are rounded.
        trees.assert_close(actual, expected, rtol=2.0**-7, atol=1e-6)

    @interpreter.elsewhere()
    def test_many_leaves_of_a_size_share_calls_and_keep_their_values(self):
        leaves = [_leaf((384,), None, seed=i) for i in range(19)]
        trees.assert_close(_run(leaves, "pallas"), _run(leaves, "xla"), rtol=3e-7, atol=3e-7)

    @interpreter.elsewhere()
    def test_leaves_with_and_without_a_factor_share_no_call(self):
        leaves = [
            _leaf((256,), factor, seed=i) for i, factor in enumerate((None, (1,), None, (1,)))
        ]
        for actual, expected in zip(_run(leaves, "pallas"), _run(leaves, "xla"), strict=True):
            trees.assert_close(actual, expected, rtol=2e-6, atol=2e-6)

    @interpreter.elsewhere()
    def test_nan_and_inf_stay_in_their_elements(self):
        leaf = _leaf((300,), (1,))
        grad = leaf.operands[0].at[5].set(jnp.nan).at[140].set(jnp.inf).at[299].set(-jnp.inf)
        leaf = dataclasses.replace(leaf, operands=(grad, *leaf.operands[1:]))
        actual, expected = _run([leaf], "pallas"), _run([leaf], "xla")
        trees.assert_close(actual, expected, rtol=3e-7, atol=3e-7)
        self.assertFalse(np.isfinite(np.asarray(actual[0][0])[[5, 140, 299]]).any())
        self.assertTrue(np.isfinite(np.delete(np.asarray(actual[0][0]), [5, 140, 299])).all())

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    @interpreter.always()
    def test_on_a_mesh_each_device_works_on_its_shards(self, axis_type: AxisType):
        cases = [
            ((64, 128), P("x", "y"), (1, 1), P(None, None)),
            ((8, 16, 256), P("x", None, "y"), (8, 1, 1), P("x", None, None)),
            ((1024,), P("y"), None, None),
            ((1024,), P("x"), None, None),
            ((64, 64), P(None, None), (1, 1), P(None, None)),
            ((8, 30), P("x", None), None, None),
        ]
        mesh = meshes.mesh(axis_type)
        leaves = [_leaf(shape, factor) for shape, _, factor, _ in cases]

        def put(leaf: execute.Leaf, spec: Any, factor_spec: Any) -> Any:
            operands = jax.device_put(leaf.operands, NamedSharding(mesh, spec))
            if leaf.factor is None:
                return operands, None
            return operands, jax.device_put(leaf.factor, NamedSharding(mesh, factor_spec))

        data = [put(leaf, case[1], case[3]) for leaf, case in zip(leaves, cases, strict=True)]
        expected = _run(leaves, "xla")
        with jax.set_mesh(mesh):

            def on(data: Any) -> Any:
                mine = [
                    dataclasses.replace(leaf, operands=operands, factor=factor)
                    for leaf, (operands, factor) in zip(leaves, data, strict=True)
                ]
                scalars = tuple(map(jnp.float32, _SCALARS))
                return execute.elementwise(_adamw, mine, scalars, "pallas")

            compiled = jax.jit(on).lower(data).compile()
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            self.assertNotIn(collective, compiled.as_text())
        actual = compiled(data)
        for outputs, (_, spec, _, _) in zip(actual, cases, strict=True):
            for x in outputs:
                wanted = NamedSharding(mesh, spec)
                self.assertTrue(x.sharding.is_equivalent_to(wanted, x.ndim), str(x.sharding))
        trees.assert_close(actual, expected, rtol=3e-7, atol=3e-7)

    @interpreter.always()
    def test_leaves_on_a_mesh_and_on_none_have_kernels_of_their_own(self):
        mesh = meshes.mesh(AxisType.Explicit)
        leaves = [_leaf((64, 128)), _put(_leaf((32, 256)), NamedSharding(mesh, P("x", "y")))]
        for order in (leaves, leaves[::-1]):
            actual, expected = _run(order, "pallas"), _run(order, "xla")
            trees.assert_close(actual, expected, rtol=3e-7, atol=3e-7)
            for leaf, outputs in zip(order, actual, strict=True):
                wanted = jax.typeof(leaf.operands[0]).sharding.spec
                self.assertEqual({jax.typeof(x).sharding.spec for x in outputs}, {wanted})

    @interpreter.always()
    def test_a_mesh_of_both_kinds_is_refused(self):
        mesh = meshes.mesh(AxisType.Explicit, y_type=AxisType.Auto)
        leaf = _put(_leaf((64, 128)), NamedSharding(mesh, P("x", "y")))
        with self.assertRaisesRegex(NotImplementedError, "one with y automatic beside explicit"):
            _run([leaf], "pallas")
        self.assertLen(_run([leaf], "xla"), 1)

    @interpreter.always()
    def test_in_a_shard_map_of_the_users(self):
        mesh = meshes.mesh(AxisType.Auto)
        leaf = _leaf((64, 128))

        def on(*operands: Any) -> Any:
            mine = dataclasses.replace(leaf, operands=operands)
            return execute.elementwise(_adamw, [mine], tuple(map(jnp.float32, _SCALARS)), "pallas")[
                0
            ]

        # The interpreter's own loops do not carry the axes over which values vary.
        mapped = jax.shard_map(
            on, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False
        )
        actual = jax.jit(mapped)(*leaf.operands)
        trees.assert_close([actual], _run([leaf], "xla"), rtol=3e-7, atol=3e-7)

    @interpreter.elsewhere()
    def test_under_vmap_and_derivatives(self):
        leaves = [_leaf((256,)), _leaf((2, 150), (1, 1))]
        data = [(leaf.operands, leaf.factor) for leaf in leaves]
        scalars = tuple(map(jnp.float32, _SCALARS))

        def on(implementation: str, data: Any) -> Any:
            mine = [
                dataclasses.replace(leaf, operands=operands, factor=factor)
                for leaf, (operands, factor) in zip(leaves, data, strict=True)
            ]
            return execute.elementwise(_adamw, mine, scalars, implementation)

        twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), data)
        total = lambda impl, data: sum(jnp.sum(x**2) for x in jax.tree.leaves(on(impl, data)))  # noqa: E731
        for transformed, argument in (
            (lambda impl: jax.vmap(functools.partial(on, impl)), twice),
            (lambda impl: jax.grad(functools.partial(total, impl)), data),
        ):
            actual, expected = transformed("pallas")(argument), transformed("xla")(argument)
            trees.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # sums of many derivatives

    @interpreter.elsewhere()
    def test_hyperparameters_that_change_compile_once(self):
        leaf = _leaf((512,))
        traced = []

        @jax.jit
        def on(operands: Any, rate: Any) -> Any:
            traced.append(None)
            mine = dataclasses.replace(leaf, operands=operands)
            scalars = (jnp.float32(0.05), jnp.float32(0.01), rate)
            return execute.elementwise(_adamw, [mine], scalars, "pallas")[0]

        first = on(leaf.operands, jnp.float32(0.1))
        second = on(leaf.operands, jnp.float32(0.2))
        self.assertLen(traced, 1)
        self.assertFalse(np.array_equal(first[0], second[0]))


class LoweringTest(parameterized.TestCase):
    def _export(self, platform: str, fn: Any, dtypes: Any, aliases: Any, outs: Any) -> str:
        leaves = [_leaf(shape, factor) for shape, factor in (((640,), None), ((640,), None))]
        leaves += [_leaf((8, 16, 128), (8, 1, 1)), _leaf((5001,), (1,))]

        def cut(leaf: execute.Leaf) -> execute.Leaf:
            operands = tuple(x.astype(d) for x, d in zip(leaf.operands, dtypes, strict=False))
            return execute.Leaf(operands, outs, leaf.factor, aliases)

        leaves = [cut(leaf) for leaf in leaves]

        def on(data: Any, scalars: Any) -> Any:
            mine = [
                dataclasses.replace(leaf, operands=operands, factor=factor)
                for leaf, (operands, factor) in zip(leaves, data, strict=True)
            ]
            return execute.elementwise(fn, mine, scalars, "pallas")

        data = [(leaf.operands, leaf.factor) for leaf in leaves]
        exported = jax.export.export(jax.jit(on), platforms=[platform])(
            data, tuple(map(jnp.float32, _SCALARS))
        )
        return exported.mlir_module()

    @parameterized.product(
        platform=["cuda", "tpu"], dtype=["float32", "bfloat16"], step=["adamw", "lion"]
    )
    def test_lowers_for_other_platforms_whatever_this_one_is(
        self, platform: str, dtype: str, step: str
    ):
        if jax.__version_info__ < (0, 10):
            self.skipTest("kernels need JAX 0.10")
        if step == "adamw":
            dtypes = (dtype, dtype, "float32", "float32", dtype)
            text = self._export(platform, _adamw, dtypes, _ALIASES, (dtype, "float32", "float32"))
        else:
            dtypes = (dtype, "bfloat16", "float32")
            text = self._export(platform, _lion, dtypes, {1: 2}, (dtype, "float32"))
        kernel = {"cuda": "@mosaic_gpu", "tpu": "@tpu_custom_call"}[platform]
        # On a GPU the two leaves of a size share a kernel.
        self.assertEqual(text.count(kernel), {"cuda": 3, "tpu": 4}[platform])

    @parameterized.parameters(((1024,), None), ((256, 512), (1, 1)), ((4, 256, 512), (4, 1, 1)))
    def test_the_tpu_kernel_in_the_interpreter_of_tpus(self, shape: Any, factor: Any):
        from jax.experimental.pallas import tpu as pltpu

        leaf = _leaf(shape, factor)
        rows = None if leaf.factor is None else leaf.factor.reshape(-1)
        actual = jax.jit(
            lambda operands, rows: mosaic_tpu.call(
                _adamw,
                operands,
                rows,
                jnp.asarray(_SCALARS, jnp.float32),
                leaf.out_dtypes,
                leaf.aliases,
                interpret=pltpu.InterpretParams(),
            )
        )(leaf.operands, rows)
        trees.assert_close([actual], _run([leaf], "xla"), rtol=3e-7, atol=3e-7)

    @parameterized.parameters((), (1,), (7,), (5000,), (50, 257), (4, 300, 700))
    def test_the_tpu_kernel_on_blocks_that_overhang(self, *shape: int):
        leaf = _leaf(shape, None)
        actual = jax.jit(
            lambda operands: mosaic_tpu.call(
                _adamw,
                operands,
                None,
                jnp.asarray(_SCALARS, jnp.float32),
                leaf.out_dtypes,
                leaf.aliases,
                interpret=True,
            )
        )(leaf.operands)
        trees.assert_close([actual], _run([leaf], "xla"), rtol=3e-7, atol=3e-7)


class RewriteTest(absltest.TestCase):
    def test_what_is_replaced_has_the_same_values(self):
        x = jnp.asarray([0.0, -0.0, 1e-37, 0.3, 2.0, 1e12, jnp.inf, jnp.nan, -1.0, -jnp.inf])
        rules = {
            "integer_pow": rewrite.integer_pow,
            "sqrt": rewrite.sqrt,
            "sign": rewrite.sign,
        }

        def fn(x: Any) -> Any:
            return {"cube": x**3, "self": x**1, "nested": jax.jit(jnp.sign)(x), "more": x**-2}

        trees.assert_equal(rewrite.rewritten(fn, rules)(x), fn(x))
        actual = rewrite.rewritten(jnp.sqrt, rules)(x)
        # Two roundings in the place of one.
        trees.assert_close(actual, jnp.sqrt(x), rtol=3e-7, atol=0)
        self.assertTrue(np.signbit(actual[1]))

    def test_a_loop_is_left_as_it_is(self):
        def fn(x: Any) -> Any:
            return jax.lax.fori_loop(0, 3, lambda _, y: 2 * y**3, x)

        rules = {"integer_pow": rewrite.integer_pow}
        np.testing.assert_allclose(rewrite.rewritten(fn, rules)(1.5), fn(1.5), rtol=1e-6)


def _equations(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """All equations with the one whose result is their first operand, inner ones included."""
    made_by: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        yield equation, made_by.get(id(equation.invars[0])) if equation.invars else None
        made_by.update((id(x), equation) for x in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


class EndsTest(parameterized.TestCase):
    """Ends that fill no block. In a loop on a GPU, XLA failed where they were written last."""

    @parameterized.parameters((_ALIASES,), ({1: 2, 2: 3},))
    @interpreter.elsewhere()
    def test_no_end_is_written_into_what_a_kernel_returned(self, aliases: Any):
        leaves = [dataclasses.replace(_leaf((n,)), aliases=aliases) for n in (1600, 1600, 50257)]
        jaxpr = jax.make_jaxpr(lambda: _run(leaves, "pallas"))().jaxpr
        made = [
            origin
            for equation, origin in _equations(jaxpr)
            if equation.primitive.name == "dynamic_update_slice"
        ]
        self.assertLen(made, len(aliases) * len(leaves))
        for origin in made:
            self.assertEqual(origin.primitive.name, "optimization_barrier")

    def test_by_default_such_leaves_are_left_to_xla(self):
        leaves = [_leaf((n,)) for n in (768, 1600, 8320) for _ in range(tiling.GROUP)]
        chosen = calls.small_and_many(dict(enumerate(leaves)))
        self.assertEqual(chosen, list(range(tiling.GROUP)))


class TilingTest(parameterized.TestCase):
    @parameterized.parameters(*range(1, 300), 5000, 2048, 768 * 3072, 50257 * 768, 50257 * 3)
    def test_blocks_and_rest_are_all(self, size: int):
        tiles = tiling.tile(size)
        self.assertEqual(tiles.covered + tiles.rest, size)
        self.assertLess(tiles.rest, max(tiling.WARPGROUP, size / 32))
        self.assertEqual(tiles.block % tiling.WARPGROUP, 0)

    def test_rows_end_with_a_block_or_are_refused(self):
        self.assertEqual(tiling.tile(4 * 512, 4), tiling.Tiling(4, 1, 512, 0))
        self.assertIsNone(tiling.tile(4 * 500, 4))

    def test_groups_hold_every_leaf_once_and_large_ones_alone(self):
        keys = ["a"] * 11 + ["b"] * 2 + ["large"] * 3
        sizes = [128] * 11 + [256] * 2 + [tiling.SMALL + 1] * 3
        lengths = [tiling.GROUP if size <= tiling.SMALL else 1 for size in sizes]
        groups = tiling.group(keys, lengths)
        self.assertCountEqual([i for g in groups for i in g], range(16))
        self.assertEqual([len(g) for g in groups], [8, 3, 2, 1, 1, 1])
        self.assertTrue(all(len({keys[i] for i in g}) == 1 for g in groups))


_NEEDS_JAX = "before JAX 0.10 this is the reason of every refusal"


class RefusalTest(parameterized.TestCase):
    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason=_NEEDS_JAX)
    def test_a_platform_without_kernels(self):
        if jax.default_backend() != "cpu":
            self.skipTest("this platform may have kernels")
        with self.assertRaisesRegex(
            NotImplementedError, r"`implementation`: .* there is no kernel for cpu\. Pass 'xla'"
        ):
            _run([_leaf((256,))], "pallas")

    @parameterized.parameters("float64", "complex64")
    @interpreter.always()
    def test_dtypes_that_kernels_do_not_have(self, dtype: str):
        with trees.float64():
            leaf = _leaf((256,), None, (dtype,) * 3 + ("float32", dtype))
            with self.assertRaisesRegex(NotImplementedError, f"kept or computed in {dtype}"):
                execute.elementwise(_adamw, [leaf], (), "pallas")

    @interpreter.always()
    def test_tpus_with_automatic_axes(self):
        mesh = meshes.mesh(AxisType.Auto)
        with (
            jax.set_mesh(mesh),
            mock.patch.object(jax, "default_backend", return_value="tpu"),
            self.assertRaisesRegex(NotImplementedError, "explicit axes, got 'pallas' on TPUs"),
        ):
            _run([_leaf((256,))], "pallas")

    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason=_NEEDS_JAX)
    def test_a_gpu_that_is_older_or_newer(self):
        device = mock.Mock(compute_capability="8.0")
        with (
            mock.patch.object(jax, "default_backend", return_value="gpu"),
            mock.patch.object(jax, "devices", return_value=[device]),
            interpreter.never(),
        ):
            with (
                mock.patch.object(jax, "__version_info__", (0, 11, 2)),
                mock.patch.object(jax, "device_count", return_value=1),
            ):
                self.assertFalse(_pay())
            with self.assertRaisesRegex(NotImplementedError, r"needs a Hopper GPU .* has 8\.0"):
                execute.elementwise(_adamw, [_leaf((256,))], (), "pallas")

    def test_what_pays_is_one_hopper_gpu(self):
        device = mock.Mock(compute_capability="9.0")
        with (
            mock.patch.object(jax, "default_backend", return_value="gpu"),
            mock.patch.object(jax, "devices", return_value=[device]),
            mock.patch.object(jax, "__version_info__", (0, 11, 2)),
        ):
            with mock.patch.object(jax, "device_count", return_value=1):
                self.assertTrue(_pay())
                for version in ((0, 10, 2), (0, 12, 0)):
                    with mock.patch.object(jax, "__version_info__", version):
                        self.assertFalse(_pay())
                # Each call by itself would compile its kernels.
                self.assertFalse(execute.kernels_are_faster([jnp.ones(2)]))
                # They read no memory of the host.
                with mock.patch.object(precision, "host_memory_of", return_value=jnp):
                    self.assertFalse(_pay())
            with mock.patch.object(jax, "device_count", return_value=2):
                self.assertFalse(_pay())
                self.assertTrue(_pay(is_local=True))


def _pay(is_local: bool = False) -> bool:
    """Whether kernels pay inside a compiled program."""
    seen = []
    jax.make_jaxpr(lambda x: seen.append(execute.kernels_are_faster([x], is_local)))(1.0)
    return seen[0]


class DefectsTest(parameterized.TestCase):
    """What went wrong in a fused MARS elsewhere, each with the test that would see it here."""

    def _outputs(self, size: int = 1000, **dtypes: Any) -> tuple[execute.Leaf, Any]:
        leaf = _leaf((size,), (1,), dtypes.get("dtypes", ("float32",) * 5))
        return leaf, _run([leaf], "pallas")[0]

    @interpreter.elsewhere()
    def test_the_previous_gradient_is_not_overwritten(self):
        leaf = _leaf((1000,), (1,))
        before = [np.array(x) for x in leaf.operands[:2]]
        _run([leaf], "pallas")
        for x, old in zip(leaf.operands[:2], before, strict=True):
            np.testing.assert_array_equal(x, old)

    @interpreter.elsewhere()
    def test_the_root_and_both_bias_corrections_are_there(self):
        leaf, (param, mu, nu) = self._outputs()
        g, prev, m, v, p = (np.asarray(x, np.float64) for x in leaf.operands)
        c = (g + 0.475 * (g - prev)) * float(leaf.factor[0])
        m, v = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c**2
        expected = p - 1e-3 * (m / 0.05) / (np.sqrt(v / 0.01) + 1e-8)
        np.testing.assert_allclose(mu, m, rtol=1e-5, atol=1e-6)  # float32 against float64
        np.testing.assert_allclose(nu, v, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(param, expected, rtol=1e-5, atol=1e-6)

    @interpreter.elsewhere()
    def test_the_tail_is_written(self):
        leaf, (param, mu, _) = self._outputs(size=1000)
        self.assertGreater(tiling.tile(1000).rest, 0)
        self.assertFalse(np.any(np.asarray(param) == np.asarray(leaf.operands[4])))
        self.assertFalse(np.any(np.asarray(mu) == np.asarray(leaf.operands[2])))

    @interpreter.elsewhere()
    def test_a_low_precision_update_is_not_lost(self):
        dtypes = ("bfloat16", "bfloat16", "float32", "float32", "bfloat16")
        leaf, (param, mu, _) = self._outputs(dtypes=dtypes)
        self.assertEqual(param.dtype, jnp.bfloat16)
        moved = np.asarray(param) != np.asarray(leaf.operands[4])
        self.assertGreater(moved.mean(), 0.1)
        self.assertEqual(mu.dtype, jnp.float32)


if __name__ == "__main__":
    absltest.main()
