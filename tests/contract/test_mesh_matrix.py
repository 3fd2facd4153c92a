"""Every variant on meshes of eight devices: type of mesh, layout, shape and dtype of the leaves.

Each case runs two steps of one tree with all shapes, and compares with one device; looks where the
state lies, from `init` on; and counts the collectives of the compiled update.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support import collectives, trees

_SHAPES = {"tall": (16, 8), "wide": (8, 16), "stack": (4, 8, 16), "vector": (16,)}
_MATRICES = 6  # tall, wide, and the four of the stack
_AXES = {
    "tall": MuonDimensionNumbers(0, 1),
    "wide": MuonDimensionNumbers(0, 1),
    "stack": MuonDimensionNumbers(1, 2),
    "vector": None,
}
_BOTH = ("fsdp", "tensor")
_LAYOUTS: dict[str, dict[str, P]] = {
    "replicated": {name: P() for name in _SHAPES},
    "fsdp": {"tall": P(_BOTH), "wide": P(_BOTH), "stack": P(None, _BOTH), "vector": P(_BOTH)},
    "fsdp_tensor": {
        "tall": P("fsdp", "tensor"),
        "wide": P("tensor", "fsdp"),
        "stack": P(None, "fsdp", "tensor"),
        "vector": P("tensor"),
    },
    # The stack by its layers, the rest whole.
    "layers": {"tall": P(), "wide": P(), "stack": P("fsdp"), "vector": P()},
}


def _grad_fn(params: Any) -> Any:
    return jax.tree.map(lambda p: 0.3 * p + 0.1, params)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A setting, and what its update may communicate."""

    make: Callable[[], optax.GradientTransformationExtraArgs]
    collectives: str
    """"none"; "numbers", at most `numbers` for each matrix; or "matrices"."""

    tolerance: float = 1e-6  # sums of the clip's norm in another order
    numbers: int = 1


# Newton-Schulz in float32: bfloat16 would round away what is compared. It amplifies what the order
# of a sum changes.
_NS = {"ns_steps": 2, "ns_dtype": "float32", "weight_dimension_numbers": _AXES}
_PLAIN = {"weight_dimension_numbers": _AXES}
_VARIANTS: dict[str, Variant] = {
    "mars": Variant(functools.partial(mars_optax.mars, 0.1, **_PLAIN), "numbers"),
    "mars_exact": Variant(
        functools.partial(mars_optax.mars, 0.1, correction="exact", **_PLAIN), "numbers"
    ),
    "mars_adaptive": Variant(
        functools.partial(mars_optax.mars, 0.1, gamma=mars_optax.AdaptiveGamma(), **_PLAIN),
        "numbers",
        numbers=3,  # the norm of the clip, and two of gamma
    ),
    "mars_lion": Variant(functools.partial(mars_optax.mars_lion, 0.1, **_PLAIN), "numbers"),
    "mars_shampoo": Variant(
        functools.partial(mars_optax.mars_shampoo, 0.1, **_NS), "matrices", 1e-4
    ),
    "mars_m": Variant(functools.partial(mars_optax.mars_m, 0.1, **_NS), "matrices", 1e-4),
    "mars_without_clip": Variant(
        functools.partial(mars_optax.mars, 0.1, max_norm=None, **_PLAIN), "none"
    ),
    "mars_lion_without_clip": Variant(
        functools.partial(mars_optax.mars_lion, 0.1, max_norm=None, **_PLAIN), "none"
    ),
    "storm_adamw": Variant(functools.partial(mars_optax.storm_adamw, 0.1), "none"),
    "correct_gradients": Variant(mars_optax.correct_gradients, "none"),
}


def _host_tree(seed: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(jnp.dtype(dtype)) for k, s in _SHAPES.items()}


def _compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The compiled program, with all the roundings to bfloat16 that it is written with."""
    return jax.jit(fn).lower(*args).compile({"xla_allow_excess_precision": False})


def _update_of(tx: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params, grad_fn=_grad_fn)

    return update


@functools.cache
def _expected(name: str, dtype: str) -> tuple[Any, Any]:
    """Updates and state after two steps on one device."""
    tx = _VARIANTS[name].make()
    params, *grads = (_host_tree(i, dtype) for i in range(3))
    state, updates = tx.init(params), None
    update = _compiled(_update_of(tx), grads[0], state, params)
    for gradient in grads:
        updates, state = update(gradient, state, params)
    return trees.copy(updates), trees.copy(state)


def _cases(every: bool) -> Iterator[tuple[str, AxisType, str, str]]:
    """All of the matrix; or each variant on both types of mesh, layouts and dtypes in turn."""
    types, dtypes = (AxisType.Auto, AxisType.Explicit), ("float32", "bfloat16")
    if every:
        yield from itertools.product(_VARIANTS, types, _LAYOUTS, dtypes)
        return
    layouts = itertools.cycle(("fsdp_tensor", "fsdp", "layers", "fsdp", "fsdp_tensor"))
    for (name, axis_type), layout in zip(
        itertools.product(_VARIANTS, types), layouts, strict=False
    ):
        yield name, axis_type, layout, "bfloat16" if layout == "fsdp" else "float32"


def _named(cases: Iterator[tuple[str, AxisType, str, str]]) -> Iterator[tuple[Any, ...]]:
    for name, axis_type, layout, dtype in cases:
        yield f"_{name}_{axis_type.name}_{layout}_{dtype}", name, axis_type, layout, dtype


class MeshMatrixTest(parameterized.TestCase):
    @parameterized.named_parameters(*_named(_cases(every=False)))
    def test_on_a_mesh_as_on_one_device(self, *case: Any):
        self._check(*case)

    @parameterized.named_parameters(*_named(_cases(every=True)))
    @pytest.mark.slow
    def test_on_every_mesh_as_on_one_device(self, *case: Any):
        self._check(*case)

    def _check(self, name: str, axis_type: AxisType, layout: str, dtype: str) -> None:
        variant = _VARIANTS[name]
        tx = variant.make()
        mesh = jax.make_mesh(
            (4, 2), _BOTH, axis_types=(axis_type,) * 2, devices=jax.devices("cpu")[:8]
        )
        shardings = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS[layout].items()}
        with jax.set_mesh(mesh):
            params, *grads = (jax.device_put(_host_tree(i, dtype), shardings) for i in range(3))
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
            )
            init = jax.jit(tx.init).lower(abstract).compile()
            self._check_places(init.output_shardings, shardings, "abstract")
            if axis_type is AxisType.Explicit:
                # An abstract value names its place on an abstract mesh; a scalar names none.
                specs = jax.tree.map(
                    lambda x: NamedSharding(mesh, x.sharding.spec if x.sharding else P()),
                    jax.eval_shape(tx.init, abstract),
                )
                self._check_places(specs, shardings, "eval_shape")
            state = init(params)
            update = _compiled(_update_of(tx), grads[0], state, params)
            # Compiled for the places of the first state: the second step refuses any other.
            for gradient in grads:
                updates, new_state = update(gradient, state, params)
                trees.assert_same_types(new_state, state)
                state = new_state
            self._check_places(jax.tree.map(lambda x: x.sharding, state), shardings, "state")
            self._check_places(jax.tree.map(lambda x: x.sharding, updates), shardings, "updates")
        self._check_collectives(variant, update.as_text(), axis_type, layout)
        expected, expected_state = _expected(name, dtype)
        self._check_close(updates, expected, variant.tolerance)
        self._check_close(state, expected_state, variant.tolerance)

    def _check_places(self, places: Any, shardings: Any, what: str) -> None:
        found = set()
        for path, place in jax.tree_util.tree_leaves_with_path(places):
            name = trees.path_of(path).rpartition("/")[2]
            has_its_shape = not {"cross", "square"} & set(trees.path_of(path).split("/"))
            if name in shardings and has_its_shape:
                ndim = len(_SHAPES[name])
                self.assertTrue(
                    place.is_equivalent_to(shardings[name], ndim),
                    f"{what}, {trees.path_of(path)}: {place}",
                )
                found.add(name)
        self.assertEqual(found, set(_SHAPES))

    def _check_collectives(
        self, variant: Variant, text: str, axis_type: AxisType, layout: str
    ) -> None:
        found = collectives.collectives(text)
        if variant.collectives == "none":
            self.assertEmpty(found)
        large = [c for c in found if c.elements > variant.numbers * _MATRICES]
        if variant.collectives == "numbers":
            self.assertEmpty(large)
        # On a mesh of automatic axes the compiler decides what Newton-Schulz communicates, and that
        # of JAX 0.7 keeps the stack divided between the iterations on explicit ones, too.
        if axis_type is AxisType.Explicit and jax.__version_info__ >= (0, 10):
            self.assertEmpty([c for c in found if c.in_loop])
            # Gathered once, over one axis of the mesh after the other.
            self.assertLessEqual(len(large), 2 * 3, large)
            if layout == "layers":
                # A stack that is divided by its layers is orthogonalized where it is.
                self.assertLess(max((c.elements for c in found), default=0), 4 * 8 * 16)

    def _check_close(self, actual: Any, expected: Any, tolerance: float) -> None:
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
        ):
            # A number between two of bfloat16 may go to either: one unit in the last place.
            rtol = 2**-7 if y.dtype == jnp.bfloat16 else tolerance
            wide = y.astype(np.float64)
            np.testing.assert_allclose(
                np.asarray(x).astype(np.float64),
                wide,
                rtol=rtol,
                atol=tolerance * abs(wide).max(),
                err_msg=trees.path_of(path),
            )


if __name__ == "__main__":
    absltest.main()
