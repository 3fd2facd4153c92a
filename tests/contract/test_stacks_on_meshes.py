"""Newton-Schulz on meshes of eight devices: matrices move whole, once there and once back.

One tree for each type of mesh and layout: results are those of one device and lie where the leaves
lie; the collectives of the compiled program are counted and measured; a NaN stays in its matrix.
Then what does not move, derivatives, `vmap`, and the user's own function.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import orthogonalize, partition, reshard
from tests.support import collectives, meshes

_BOTH = ("x", "y")
# Five and three do not divide over eight devices, nor over four. The short side of "small" is not
# worth a division where that of the others is.
_SHAPES: dict[str, tuple[int, ...]] = {
    **{f"wide{i}": (16, 32) for i in range(5)},
    **{f"tall{i}": (32, 16) for i in range(3)},
    "stack": (8, 16, 32),
    "small": (8, 16),
}
_SHORTEST = 16
_MATRIX = 16 * 32
_MATRICES = 5 + 3 + 8 + 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where leaves lie, and in how many collectives their matrices may come and go.

    In each direction a stack takes one all-to-all for every axis of its matrices that is divided.
    Three tall ones are worked on by four devices: the other axis of the mesh is gathered before.
    Small ones are gathered, and every device has the results of its own.
    """

    matrix: P
    stack: P
    counts: dict[str, int]


_LAYOUTS = {
    "rows": Layout(P(_BOTH), P(None, _BOTH), {"wide": 2, "tall": 3, "stack": 2, "small": 1}),
    "columns": Layout(
        P(None, _BOTH), P(None, None, _BOTH), {"wide": 2, "tall": 3, "stack": 2, "small": 1}
    ),
    "rows_and_columns": Layout(
        P("x", "y"), P(None, "x", "y"), {"wide": 4, "tall": 3, "stack": 4, "small": 2}
    ),
    # Everything is everywhere; only results move.
    "replicated": Layout(P(), P(), {"wide": 1, "tall": 1, "stack": 1, "small": 0}),
    "stack_axis": Layout(P(), P(_BOTH), {"wide": 1, "tall": 1, "stack": 0, "small": 0}),
    "stack_axis_and_rows": Layout(
        P("x", "y"), P("x", "y"), {"wide": 4, "tall": 3, "stack": 2, "small": 2}
    ),
}
# Whether the axes are explicit or automatic; without a mesh in context only shardings tell.
_EXPLICIT, _AUTO, _NO_CONTEXT = "explicit", "auto", "auto_without_context"
_TYPES = (_EXPLICIT, _AUTO, _NO_CONTEXT)


def _host() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in _SHAPES.items()}


def _function(steps: Any = 2, **options: Any) -> Callable[[Any], Any]:
    """A function of a tree that orthogonalizes the last two axes of its leaves."""

    def fn(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        axes = [
            partition.Axes((x.ndim - 2,), (x.ndim - 1,), tuple(range(x.ndim - 2)))
            for x in tree.values()
        ]
        call = orthogonalize.Orthogonalization(steps=steps, dtype="float32", **options)
        return dict(zip(tree, call(list(tree.values()), axes), strict=True))

    return fn


def _mesh(kind: str) -> jax.sharding.Mesh:
    return meshes.mesh(AxisType.Explicit if kind == _EXPLICIT else AxisType.Auto)


def _context(kind: str, mesh: jax.sharding.Mesh) -> Any:
    return contextlib.nullcontext() if kind == _NO_CONTEXT else jax.set_mesh(mesh)


def _placed(host: Any, mesh: jax.sharding.Mesh, layout: Layout) -> Any:
    specs = {k: layout.stack if x.ndim == 3 else layout.matrix for k, x in host.items()}
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in host.items()}


@functools.cache
def _expected(steps: int) -> Any:
    return jax.device_get(jax.jit(_function(steps))(_host()))


@functools.cache
def _compiled(kind: str, layout: str, steps: int) -> Any:
    mesh = _mesh(kind)
    with _context(kind, mesh), mock.patch.object(reshard, "SHORTEST_TO_DIVIDE", _SHORTEST):
        return jax.jit(_function(steps)).lower(_placed(_host(), mesh, _LAYOUTS[layout])).compile()


def _large(compiled: Any) -> list[collectives.Collective]:
    """Collectives but for those of norms, which are a number or less for each matrix."""
    return [c for c in collectives.collectives(compiled.as_text()) if c.elements > _MATRICES]


def _named(cases: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for case in cases:
        yield "_" + "_on_".join(reversed(case)), *case


_ALL = list(itertools.product(_TYPES, _LAYOUTS))
_SOME = [
    (_EXPLICIT, "rows"),
    (_EXPLICIT, "rows_and_columns"),
    (_EXPLICIT, "stack_axis_and_rows"),
    (_AUTO, "columns"),
    (_AUTO, "rows_and_columns"),
    (_AUTO, "stack_axis"),
    (_NO_CONTEXT, "rows_and_columns"),
]


class LayoutsTest(parameterized.TestCase):
    @parameterized.named_parameters(*_named(_SOME))
    def test_on_a_mesh_as_on_one_device(self, kind: str, layout: str):
        self._check(kind, layout)

    @parameterized.named_parameters(*_named([c for c in _ALL if c not in _SOME]))
    @pytest.mark.slow
    def test_on_every_mesh_as_on_one_device(self, kind: str, layout: str):
        self._check(kind, layout)

    def _check(self, kind: str, layout: str) -> None:
        compiled = _compiled(kind, layout, 2)
        leaves = _placed(_host(), _mesh(kind), _LAYOUTS[layout])
        results = compiled(leaves)
        for name, y in results.items():
            # Sums in another order.
            np.testing.assert_allclose(y, _expected(2)[name], rtol=1e-5, atol=1e-5, err_msg=name)
            self.assertTrue(y.sharding.is_equivalent_to(leaves[name].sharding, y.ndim), name)
        self._check_collectives(kind, layout, _large(compiled))
        # What is not finite stays in its matrix, wherever that went.
        ill = _host()
        ill["wide2"][3, 4] = np.nan
        ill["stack"][5, 6, 7] = np.inf
        ill = jax.device_get(compiled(_placed(ill, _mesh(kind), _LAYOUTS[layout])))
        self.assertTrue(np.isnan(ill["wide2"]).all())
        self.assertTrue(np.isnan(ill["stack"][5]).all())
        for name in results:
            if name != "wide2":
                kept = np.arange(8) != 5 if name == "stack" else slice(None)
                np.testing.assert_array_equal(
                    ill[name][kept], np.asarray(results[name])[kept], name
                )

    def _check_collectives(
        self, kind: str, layout: str, found: list[collectives.Collective]
    ) -> None:
        self.assertEmpty([c for c in found if c.in_loop])
        places = _LAYOUTS[layout]
        self.assertLessEqual(len(found), sum(places.counts.values()), found)
        if layout in ("replicated", "stack_axis"):
            # Every device gets the results of all, but for those of a stack that is divided.
            self.assertEqual({c.kind for c in found} - {"all-gather"}, set())
            return
        if kind == _NO_CONTEXT:
            # Without a mesh nothing can be filled up: the five and the three go everywhere.
            self.assertLessEqual(max(c.elements for c in found), 5 * _MATRIX)
            return
        # No device receives more than the two matrices that it works on, at any time.
        self.assertLessEqual(max(c.elements for c in found), 2 * _MATRIX, found)

    @parameterized.product(kind=[_EXPLICIT, _AUTO], layout=["rows_and_columns"])
    def test_more_steps_communicate_nothing_more(self, kind: str, layout: str):
        # Twelve steps are a loop.
        self._check_steps(kind, layout, 12)

    @parameterized.named_parameters(*_named(_ALL))
    @pytest.mark.slow
    def test_more_steps_communicate_nothing_more_anywhere(self, kind: str, layout: str):
        for steps in (7, 12):
            self._check_steps(kind, layout, steps)

    def _check_steps(self, kind: str, layout: str, steps: int) -> None:
        compiled = _compiled(kind, layout, steps)

        def counted(found: list[collectives.Collective]) -> list[tuple[Any, ...]]:
            # The compiler of JAX 0.7 keeps the small matrices, which every device has whole,
            # divided between the iterations of a loop.
            size = 0 if jax.__version_info__ >= (0, 10) else _MATRIX // 4
            return sorted(dataclasses.astuple(c) for c in found if c.elements > size)

        self.assertEqual(counted(_large(compiled)), counted(_large(_compiled(kind, layout, 2))))
        if layout != "stack_axis":
            self.assertNotEmpty(_large(compiled))
        if steps > 10:
            self.assertIn("while(", compiled.as_text())
        results = compiled(_placed(_host(), _mesh(kind), _LAYOUTS[layout]))
        for name, y in results.items():
            # Noise in small singular values grows by 3.4445 at each of the first steps.
            np.testing.assert_allclose(y, _expected(steps)[name], atol=1e-3, err_msg=name)


class WhatMovesTest(parameterized.TestCase):
    """Single leaves, with the package's own threshold or another."""

    def _found(
        self,
        kind: str,
        shape: tuple[int, ...],
        spec: P,
        fn: Callable[[Any], Any] | None = None,
        shortest: int = _SHORTEST,
    ) -> list[collectives.Collective]:
        mesh = _mesh(kind)
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        fn = _function() if fn is None else fn
        with _context(kind, mesh), mock.patch.object(reshard, "SHORTEST_TO_DIVIDE", shortest):
            placed = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
            compiled = jax.jit(fn).lower(placed).compile()
            y = compiled(placed)["x"]
        np.testing.assert_allclose(y, jax.jit(fn)({"x": x})["x"], rtol=1e-5, atol=1e-5)
        self.assertTrue(y.sharding.is_equivalent_to(placed["x"].sharding, y.ndim))
        return collectives.collectives(compiled.as_text())

    @parameterized.parameters(*_TYPES)
    def test_a_stack_divided_along_itself_does_not_move(self, kind: str):
        self.assertEmpty(self._found(kind, (8, 16, 32), P(_BOTH)))

    @parameterized.parameters(*_TYPES)
    def test_whole_matrices_that_are_small_do_not_move(self, kind: str):
        found = self._found(kind, (8, 16, 32), P(), shortest=17)
        self.assertEmpty(found)

    @parameterized.parameters(*_TYPES)
    def test_small_matrices_are_gathered_and_nothing_comes_back(self, kind: str):
        found = self._found(kind, (8, 16, 32), P(None, _BOTH), shortest=17)
        large = [c for c in found if c.elements > 8]
        self.assertEqual([(c.kind, c.elements) for c in large], [("all-gather", 8 * _MATRIX)])

    def test_the_threshold_is_that_of_the_module(self):
        side = reshard.SHORTEST_TO_DIVIDE
        for shape, kinds in (
            ((8, side - 8, side), {"all-gather"}),
            ((8, side, side), {"all-to-all"}),
        ):
            found = self._found(_EXPLICIT, shape, P(None, _BOTH), _function(steps=1), shortest=side)
            self.assertEqual({c.kind for c in found if c.elements > 8}, kinds)

    def test_the_users_function_gets_whole_matrices(self):
        def own(stack: jax.Array) -> jax.Array:
            return stack / jnp.linalg.norm(stack, axis=(1, 2), keepdims=True) @ jnp.eye(32)

        for shape, spec in (((16, 32), P("x", "y")), ((4, 16, 32), P("x", "y"))):
            found = self._found(_EXPLICIT, shape, spec, _function(fn=own))
            large = [c for c in found if c.elements > len(shape)]
            # One for each axis of the mesh: the result is sent nowhere.
            self.assertLessEqual(len(large), 2, large)
            self.assertEqual({c.kind for c in large}, {"all-gather"})


class TransformationsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.object(reshard, "SHORTEST_TO_DIVIDE", _SHORTEST)
        patch.start()
        self.addCleanup(patch.stop)

    @parameterized.parameters(*_TYPES)
    def test_derivatives_in_both_modes_are_those_of_one_device(self, kind: str):
        rng = np.random.default_rng(1)
        x, weights = rng.standard_normal((2, 5, 16, 32)).astype(np.float32)

        def derivatives(x: jax.Array, weights: jax.Array) -> Any:
            def fn(x: jax.Array) -> jax.Array:
                return _function()({"x": x})["x"]

            forward = jax.jvp(fn, (x,), (weights,))[1]
            reverse = jax.grad(lambda x: jnp.sum(fn(x) * weights))(x)
            return forward, reverse

        expected = jax.jit(derivatives)(x, weights)
        mesh = _mesh(kind)
        with _context(kind, mesh):
            sharding = NamedSharding(mesh, P(None, "x", "y"))
            actual = jax.jit(derivatives)(*jax.device_put((x, weights), sharding))
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # sums in another order

    @parameterized.parameters(*range(4))
    def test_axes_that_are_merged_may_be_divided(self, divided: int):
        x = np.random.default_rng(3).standard_normal((8, 8, 8, 16)).astype(np.float32)
        options: Any = {"dtype": "float32", "steps": 1}
        options["weight_dimension_numbers"] = MuonDimensionNumbers((0, 1), (2, 3))
        fn = functools.partial(mars_optax.orthogonalize, **options)
        mesh, spec = _mesh(_EXPLICIT), P(*(_BOTH if i == divided else None for i in range(4)))
        with _context(_EXPLICIT, mesh):
            actual = jax.jit(fn)(jax.device_put(x, NamedSharding(mesh, spec)))
        self.assertEqual(actual.sharding.spec, spec)
        np.testing.assert_allclose(actual, jax.jit(fn)(x), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(*_TYPES)
    def test_vmap_equals_a_stack(self, kind: str):
        x = np.random.default_rng(2).standard_normal((3, 8, 16, 32)).astype(np.float32)
        spec = MuonDimensionNumbers(1, 2)

        def fn(x: jax.Array) -> jax.Array:
            return mars_optax.orthogonalize(
                x, steps=2, dtype="float32", weight_dimension_numbers=spec
            )

        mesh = _mesh(kind)
        with _context(kind, mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P(None, None, "x", "y")))
            actual = jax.jit(jax.vmap(fn))(placed)
        np.testing.assert_allclose(
            actual.reshape(-1, 16, 32), jax.jit(fn)(x.reshape(-1, 16, 32)), rtol=1e-5, atol=1e-5
        )


if __name__ == "__main__":
    absltest.main()
