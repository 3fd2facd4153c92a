"""Meshes of automatic axes: updates and state lie as the parameters, and steps can be exported.

Leaves of one shape that lie in every way that one and two mesh axes allow are one tree, so that
all share their stacks.
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.export
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import reshard
from tests import registry
from tests.support import meshes

_SHORTEST = 16
_MATRIX_RULES = registry.select(
    "optimizer",
    core=True,
    contracts=["places"],
    where=lambda entry: entry.collectives() == "matrices",
)
_MATRIX, _STACK = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 2)


def _every_spec(rank: int) -> list[P]:
    """All specs over the axes "x" and "y" of a leaf."""
    one = [(i, axes) for i in range(rank) for axes in ("x", "y", ("x", "y"), ("y", "x"))]
    specs = [P()] + [P(*[axes if j == i else None for j in range(rank)]) for i, axes in one]
    for x, y in itertools.permutations(range(rank), 2):
        specs.append(P(*["x" if i == x else "y" if i == y else None for i in range(rank)]))
    return specs


_FEW = {
    "tall": ((32, 16), _MATRIX, [P("x"), P("x", "y")]),
    "wide": ((16, 32), _MATRIX, [P("y", "x"), P("x", "y"), P()]),
    "stack": ((8, 16, 32), _STACK, [P("x"), P(None, "x", "y")]),
    "vector": ((16,), None, [P("x")]),
}
_ALL = {
    "tall": ((32, 16), _MATRIX, _every_spec(2)),
    "wide": ((16, 32), _MATRIX, _every_spec(2)),
    "square": ((16, 16), _MATRIX, _every_spec(2)),
    "small": ((8, 16), _MATRIX, _every_spec(2)),
    "stack": ((8, 16, 32), _STACK, _every_spec(3)),
    "vector": ((16,), None, _every_spec(1)),
}


@functools.cache
def _tree(every: bool) -> tuple[Any, Any, Any]:
    """Leaves on the host, their specs and their axes."""
    rng = np.random.default_rng(0)
    leaves, specs, axes = {}, {}, {}
    for kind, (shape, numbers, all_specs) in (_ALL if every else _FEW).items():
        for i, spec in enumerate(all_specs):
            name = f"{kind}{i}"
            leaves[name] = rng.standard_normal(shape).astype(np.float32)
            specs[name], axes[name] = spec, numbers
    return leaves, specs, axes


def _placed(every: bool) -> tuple[Any, Any, Any]:
    host, specs, axes = _tree(every)
    mesh = meshes.mesh(AxisType.Auto)
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in host.items()}
    return params, specs, axes


def _step(tx: Any, is_fused: bool, **extra_args: Any) -> Callable[..., Any]:
    if is_fused:
        return functools.partial(mars_optax.fused_step, tx, **extra_args)
    return functools.partial(tx.update, **extra_args)


def _make(entry: registry.Entry, axes: Any) -> Any:
    return entry.precise(
        weight_dimension_numbers=axes, **({"ns_steps": 1} if entry.accepts("ns_steps") else {})
    )


def _cases(entries: Any, settings: Any) -> Iterator[tuple[Any, ...]]:
    for (name, entry), setting in itertools.product(entries, settings):
        labels = ("fused", "context", "specs")
        yield "_".join([name, *itertools.compress(labels, setting)]), entry, *setting


class PlacesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.object(reshard, "SHORTEST_TO_DIVIDE", _SHORTEST)
        patch.start()
        self.addCleanup(patch.stop)

    def _check(
        self, entry: registry.Entry, is_fused: bool, has_context: bool, has_specs: bool, every: bool
    ) -> None:
        params, specs, axes = _placed(every)
        tx = _make(entry, axes)
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        extra_args = {"param_specs": specs} if has_specs else {}
        with jax.set_mesh(mesh) if has_context else contextlib.nullcontext():
            state = jax.jit(tx.init)(params)
            step = jax.jit(_step(tx, is_fused, **extra_args))
            results = step(params, state, params)
        found = set()
        for path, x in jax.tree_util.tree_leaves_with_path((results, state)):
            key = next((k.key for k in path if getattr(k, "key", None) in params), None)
            if key is not None and x.shape == params[key].shape:
                where = f"{jax.tree_util.keystr(path)}: {x.sharding}, not {specs[key]}"
                self.assertTrue(x.sharding.is_equivalent_to(params[key].sharding, x.ndim), where)
                found.add(key)
        self.assertEqual(found, set(params))
        host = _tree(every)[0]
        expected, _ = jax.jit(_step(tx, is_fused))(host, tx.init(host), host)
        for key, x in results[0].items():
            # Sums in another order.
            np.testing.assert_allclose(x, expected[key], rtol=1e-4, atol=1e-5, err_msg=key)

    @parameterized.named_parameters(*_cases(_MATRIX_RULES, [(False,) * 3, (True,) * 3]))
    def test_updates_and_state_lie_as_the_parameters(self, *case: Any):
        self._check(*case, every=False)

    @parameterized.named_parameters(
        *_cases(
            registry.select(
                "optimizer",
                core=True,
                contracts=["places"],
                where=lambda entry: entry.accepts("weight_dimension_numbers"),
            ),
            # Any two of the settings meet in all four ways.
            [case for case in itertools.product((False, True), repeat=3) if sum(case) % 2 == 0],
        )
    )
    @pytest.mark.slow
    def test_in_every_place(self, *case: Any):
        self._check(*case, every=True)

    @parameterized.named_parameters(*_MATRIX_RULES)
    def test_with_specs_a_step_can_be_serialized(self, entry: registry.Entry):
        pytest.importorskip("flatbuffers")
        params, specs, axes = _placed(every=False)
        tx = _make(entry, axes)
        leaves, treedef = jax.tree.flatten((params, tx.init(params), params))

        def flat(*leaves: Any) -> Any:
            args = jax.tree.unflatten(treedef, leaves)
            return jax.tree.leaves(tx.update(*args, param_specs=specs))

        with jax.set_mesh(leaves[0].sharding.mesh):
            step = jax.jit(flat)
            data = jax.export.export(step)(*leaves).serialize()
            again = jax.jit(jax.export.deserialize(data).call)(*leaves)
            for x, y in zip(step(*leaves), again, strict=True):
                np.testing.assert_array_equal(x, y)

    @pytest.mark.slow
    def test_with_specs_a_second_process_finds_the_step_in_the_cache(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": directory}
        for event in ("cache_misses", "cache_hits"):
            run = subprocess.run(
                [sys.executable, "-c", _CACHED], env=environment, capture_output=True, text=True
            )
            self.assertEqual(run.stdout.split(), [event], run.stderr)


_CACHED = """
import jax
import jax.monitoring
import mars_optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
place = NamedSharding(mesh, P("x"))
params = {"w": jax.ShapeDtypeStruct((256, 256), "float32", sharding=place)}
tx = mars_optax.mars_m(0.1)
with jax.set_mesh(mesh):
    state = jax.eval_shape(tx.init, params)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, param_specs={"w": P("x")}))
    lowered = update.lower(params, state, params)
    jax.monitoring.register_event_listener(
        lambda event, **_: event.endswith(("cache_hits", "cache_misses"))
        and print(event.rpartition("/")[2])
    )
    lowered.compile()
"""


if __name__ == "__main__":
    absltest.main()
