"""The registry on meshes of eight devices: type of mesh, layout, shape and dtype of the leaves.

Each case runs two steps of one tree with all shapes, and compares with one device; looks where the
state lies, from `init` on; and counts the collectives of the compiled update.
"""

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

from tests import registry
from tests.support import collectives, trees

_SHAPES = {"tall": (16, 8), "wide": (8, 16), "stack": (4, 8, 16), "vector": (16,)}
_NORMS = 7  # of tall, wide, the four of the stack, and the vector
_ROWS = 16 + 8 + 4 * 8 + 1
_TYPES = (AxisType.Auto, AxisType.Explicit)
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


def _leaves(entry: registry.Entry) -> list[str]:
    """The leaves that it takes."""
    return [k for k, axes in _AXES.items() if axes is not None or not entry.only_matrices()]


def _make(entry: registry.Entry) -> optax.GradientTransformationExtraArgs:
    options = {"ns_steps": 2, "weight_dimension_numbers": {k: _AXES[k] for k in _leaves(entry)}}
    return entry.precise(**{k: v for k, v in options.items() if entry.accepts(k)})


def _host_tree(entry: registry.Entry, seed: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tree = {k: rng.standard_normal(s).astype(jnp.dtype(dtype)) for k, s in _SHAPES.items()}
    return {k: tree[k] for k in _leaves(entry)}


def _compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The compiled program, with all the roundings to bfloat16 that it is written with."""
    return jax.jit(fn).lower(*args).compile({"xla_allow_excess_precision": False})


@functools.cache
def _expected(name: str, dtype: str) -> tuple[Any, Any]:
    """Updates and state after two steps on one device."""
    entry = registry.get(name)
    tx = _make(entry)
    params, *grads = (_host_tree(entry, i, dtype) for i in range(3))
    state, updates = tx.init(params), None
    update = _compiled(tx.update, grads[0], state, params)
    for gradient in grads:
        updates, state = update(gradient, state, params)
    return trees.copy(updates), trees.copy(state)


def _named(cases: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for entry, axis_type, layout, dtype in cases:
        yield f"_{entry.name}_{axis_type.name}_{layout}_{dtype}", entry, axis_type, layout, dtype


def _cases(core: bool) -> Iterator[tuple[Any, ...]]:
    """Core entries, or the others, on both types of mesh, with layouts and dtypes in turn."""
    layouts = itertools.cycle(("fsdp_tensor", "fsdp", "layers", "fsdp", "fsdp_tensor"))
    entries = [entry for _, entry in registry.select(contracts=["meshes"]) if entry.core is core]
    for (entry, axis_type), layout in zip(_on_types(entries), layouts, strict=False):
        yield entry, axis_type, layout, "bfloat16" if layout == "fsdp" else "float32"


def _every_case() -> Iterator[tuple[Any, ...]]:
    entries = [entry for _, entry in registry.select(contracts=["meshes"], core=True)]
    for (entry, axis_type), layout, dtype in itertools.product(
        _on_types(entries), _LAYOUTS, ("float32", "bfloat16")
    ):
        yield entry, axis_type, layout, dtype


def _on_types(entries: list[registry.Entry]) -> list[tuple[registry.Entry, AxisType]]:
    """The entries on the types of mesh axes on which their places are certain."""
    pairs = itertools.product(entries, _TYPES)
    return [(e, t) for e, t in pairs if "places" not in e.skips or t is not AxisType.Auto]


class MeshMatrixTest(parameterized.TestCase):
    @parameterized.named_parameters(*_named(_cases(core=True)))
    def test_on_a_mesh_as_on_one_device(self, *case: Any):
        self._check(*case)

    @parameterized.named_parameters(*_named(_cases(core=False)))
    @pytest.mark.slow
    def test_every_setting_on_a_mesh_as_on_one_device(self, *case: Any):
        self._check(*case)

    @parameterized.named_parameters(*_named(_every_case()))
    @pytest.mark.slow
    def test_on_every_mesh_as_on_one_device(self, *case: Any):
        self._check(*case)

    def _check(self, entry: registry.Entry, axis_type: AxisType, layout: str, dtype: str) -> None:
        tx = _make(entry)
        mesh = jax.make_mesh(
            (4, 2), _BOTH, axis_types=(axis_type,) * 2, devices=jax.devices("cpu")[:8]
        )
        shardings = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS[layout].items()}
        shardings = {k: shardings[k] for k in _leaves(entry)}
        with jax.set_mesh(mesh):
            params, *grads = (
                jax.device_put(_host_tree(entry, i, dtype), shardings) for i in range(3)
            )
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
            )
            init = jax.jit(tx.init).lower(abstract).compile()
            shapes = jax.eval_shape(tx.init, abstract)
            self._check_places(shapes, init.output_shardings, shardings, "abstract")
            if axis_type is AxisType.Explicit:
                # An abstract value names its place on an abstract mesh; a scalar names none.
                specs = jax.tree.map(
                    lambda x: NamedSharding(mesh, x.sharding.spec if x.sharding else P()), shapes
                )
                self._check_places(shapes, specs, shardings, "eval_shape")
            state = init(params)
            update = _compiled(tx.update, grads[0], state, params)
            # Compiled for the places of the first state: the second step refuses any other.
            for gradient in grads:
                updates, new_state = update(gradient, state, params)
                self.assertEqual(*(jax.tree.map(jax.typeof, x) for x in (new_state, state)))
                state = new_state
            for what, tree in (("state", state), ("updates", updates)):
                places = jax.tree.map(lambda x: x.sharding, tree)
                self._check_places(tree, places, shardings, what)
        self._check_collectives(entry, update.as_text(), axis_type, layout)
        if "rounding" in entry.skips:
            return
        # Sums of norms are added in another order, and what is stored is rounded to either of two
        # neighbours.
        tolerance = max(entry.tolerance(1e-6), entry.rounding())
        expected, expected_state = _expected(entry.name, dtype)
        self._check_close(updates, expected, tolerance)
        self._check_close(state, expected_state, tolerance)

    def _check_places(self, tree: Any, places: Any, shardings: Any, what: str) -> None:
        """Each leaf lies where its parameter does, or a reduction of it over some axes would."""
        found = set()
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, x), place in zip(leaves, jax.tree.leaves(places), strict=True):
            name = trees.path_of(path).rpartition("/")[2]
            # SOAP's stacks are no reductions, but where a side is left out they look like ones.
            is_stack = {"left", "right", "left_basis", "right_basis"} & set(
                trees.path_of(path).split("/")
            )
            if name not in shardings or x.ndim != len(_SHAPES[name]) or is_stack:
                continue
            sizes = list(zip(x.shape, _SHAPES[name], strict=True))
            if all(mine in (1, its) for mine, its in sizes):
                spec = [*shardings[name].spec, *(None,) * x.ndim]
                kept = [
                    p if mine == its else None for p, (mine, its) in zip(spec, sizes, strict=False)
                ]
                wanted = NamedSharding(shardings[name].mesh, P(*kept))
                self.assertTrue(
                    place.is_equivalent_to(wanted, x.ndim),
                    f"{what}, {trees.path_of(path)}: {place}",
                )
                found.add(name)
        self.assertEqual(found, set(shardings) if leaves else set())

    def _check_collectives(
        self, entry: registry.Entry, text: str, axis_type: AxisType, layout: str
    ) -> None:
        found = collectives.collectives(text)
        large = [c for c in found if c.elements > _NORMS]
        match entry.collectives():
            case "none":
                self.assertEmpty(found)
            case "numbers":
                self.assertEmpty(large)
            case "rows":
                self.assertEmpty([c for c in large if c.elements > _ROWS])
        # On a mesh of automatic axes the compiler decides what Newton-Schulz communicates, and that
        # of JAX 0.7 keeps the stack divided between the iterations on explicit ones, too.
        if axis_type is AxisType.Explicit and jax.__version_info__ >= (0, 10):
            self.assertEmpty([c for c in found if c.in_loop])
            # Gathered once, over one axis of the mesh after the other.
            self.assertLessEqual(len(large), 2 * 3 * entry.gathered, large)
            if layout == "layers" and entry.gathered == 1:
                # A stack that is divided by its layers is orthogonalized where it is. That of SOAP
                # is gathered: JAX 0.10 refuses the QR of a stack whose type says it is divided.
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
                atol=tolerance * abs(wide).max(initial=0),
                err_msg=trees.path_of(path),
            )


if __name__ == "__main__":
    absltest.main()
