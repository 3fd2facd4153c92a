"""The reader of compiled programs, on which all counts of collectives rest."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from absl.testing import absltest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import collectives

_TEXT = """\
HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (arg: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %r.1 = f32[4,2]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
}

%outer (arg: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %w.1 = (s32[], f32[4,2]{1,0}) while(%t), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
  %g.1 = bf16[8,2]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%unknown (arg: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %p.1 = f32[] collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w.2 = (s32[], f32[4,2]{1,0}) while(%t), condition=%c, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  %w.3 = (s32[], f32[4,2]{1,0}) while(%t), condition=%c, body=%unknown
  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=mesh['x'=4,'y'=2] {'x'}
  %d = f32[16]{0} all-gather-done(%s)
  %t.2 = (f32[3]{0}, s8[5]{0}) all-to-all(%a, %b), replica_groups={}
}
"""


class CollectivesTest(absltest.TestCase):
    def test_kinds_sizes_groups_and_loops_are_read(self):
        self.assertEqual(
            collectives.collectives(_TEXT),
            [
                collectives.Collective("all-reduce", 8, 32, 4, 15, in_loop=True),
                collectives.Collective("all-gather", 16, 32, 2, 3, in_loop=True),
                collectives.Collective("collective-permute", 1, 4, 0, None, in_loop=True),
                collectives.Collective("all-gather", 16, 64, 4, 1),
                collectives.Collective("all-to-all", 8, 17, 0, 1),
            ],
        )

    def test_a_compiled_program_is_read(self):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))

        def f(x: jax.Array) -> Any:
            def body(i: jax.Array, y: jax.Array) -> jax.Array:
                return y * jnp.sum(x * y + i)

            return jax.lax.fori_loop(0, 7, body, x)

        sharding = NamedSharding(mesh, P("x"))
        x = jax.device_put(jnp.ones(16), sharding)
        found = collectives.collectives(jax.jit(f).lower(x).compile().as_text())
        self.assertIn(("all-reduce", 1, 7), [(c.kind, c.elements, c.times) for c in found])


_CPU = """HloModule jit_one, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[4,2]) -> f32[32,2] {
  %a = f32[4,2]{1,0} parameter(0)
  %all-reduce.1 = (f32[], f32[4]{0}) all-reduce(%n, %m), channel_id=1, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  %swap = bf16[8]{0} collective-permute(%b), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %spread = (f32[1,2]{1,0}, f32[1,2]{1,0}) all-to-all(%p, %q), channel_id=3, \
replica_groups={{0,1},{2,3}}
  ROOT %all-gather.2 = f32[32,2]{1,0} all-gather(%a), channel_id=4, dimensions={0}
}
"""

_GPU = """HloModule jit_one, is_scheduled=true, num_partitions=2

%wrapped (w: f32[8]) -> f32[4] {
  %w = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%w), channel_id=5, dimensions={0}, to_apply=%add
}

%body (c: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
  %c = (s32[], bf16[4,6]{1,0}) parameter(0)
  %ar-start = bf16[4,6]{1,0} all-reduce-start(%g), channel_id=1, to_apply=%add
  %ar-done = bf16[4,6]{1,0} all-reduce-done(%ar-start)
  ROOT %r = (s32[], bf16[4,6]{1,0}) tuple(%i, %ar-done)
}

%condition (d: (s32[], bf16[4,6])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.9_spmd (a: f32[4,2]) -> f32[8,2] {
  %all-gather-start = (f32[4,2]{1,0}, f32[8,2]{1,0:S(1)}) all-gather-start(%a), channel_id=2, \
replica_groups=[1,2]<=[2], dimensions={0}, backend_config={"is_sync":true}
  %all-gather-done = f32[8,2]{1,0:S(1)} all-gather-done(%all-gather-start)
  %both-start = ((f32[2]{0}, bf16[3]{0}), (f32[4]{0}, bf16[6]{0})) all-gather-start(%p, %q)
  %both-done = (f32[4]{0}, bf16[6]{0}) all-gather-done(%both-start)
  %move = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%s)
  %moved = f32[8]{0} collective-permute-done(%move)
  %scatter = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%t), calls=%wrapped
  %scattered = f32[4]{0} async-done(%scatter)
  %while = (s32[], bf16[4,6]{1,0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %dot = f32[8,2]{1,0} custom-call(%u), custom_call_target="all-gather-start("
}
"""


def _totals(text: str) -> list[collectives.Total]:
    return collectives.totals(collectives.collectives(text))


class TotalsTest(absltest.TestCase):
    def test_on_cpu_they_are_one_operation_each(self):
        expected = [
            collectives.Total("all-gather", 1, 32 * 2 * 4, in_loop=False),
            collectives.Total("all-reduce", 1, 4 + 4 * 4, in_loop=False),
            collectives.Total("all-to-all", 1, 2 * 2 * 4, in_loop=False),
            collectives.Total("collective-permute", 1, 8 * 2, in_loop=False),
        ]
        self.assertEqual(_totals(_CPU), expected)

    def test_on_gpu_a_start_and_a_done_are_one_and_the_operands_are_no_result(self):
        expected = [
            collectives.Total("all-gather", 2, 8 * 2 * 4 + 4 * 4 + 6 * 2, in_loop=False),
            collectives.Total("all-reduce", 5, 5 * 4 * 6 * 2, in_loop=True),
            collectives.Total("collective-permute", 1, 8 * 4, in_loop=False),
            collectives.Total("reduce-scatter", 1, 4 * 4, in_loop=False),
        ]
        self.assertEqual(_totals(_GPU), expected)

    def test_a_start_that_names_what_it_wraps_counts_once(self):
        text = _GPU.replace("async-start(", "reduce-scatter-start(")
        self.assertEqual(_totals(text), _totals(_GPU))

    def test_in_branches_and_loops_of_unknown_length_they_are_found(self):
        text = re.sub(r", backend_config=\{\"known.*\}\}", "", _GPU).replace(
            "async-start(%t), calls=%wrapped",
            "conditional(%t), branch_computations={%condition, %wrapped}",
        )
        found = {one.kind: one for one in _totals(text)}
        self.assertEqual(found["all-reduce"], collectives.Total("all-reduce", 1, 48, in_loop=True))
        self.assertEqual(found["reduce-scatter"].count, 1)

    def test_the_compilers_own_text(self):
        mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
        cut = jax.NamedSharding(mesh, P("devices"))
        x = jax.device_put(jnp.ones((16, 3)), cut)
        whole = jax.NamedSharding(mesh, P())
        program = jax.jit(lambda x: x * 2, out_shardings=whole).lower(x).compile().as_text()
        expected = [collectives.Total("all-gather", 1, 16 * 3 * 4, in_loop=False)]
        self.assertEqual(_totals(program), expected)


if __name__ == "__main__":
    absltest.main()
