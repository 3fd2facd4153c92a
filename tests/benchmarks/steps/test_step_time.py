"""The benchmark of optimizer steps: its floors, its shapes, its loop, and the command."""

import contextlib
import functools
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

import mars_optax
from benchmarks import gpt2_shapes
from benchmarks.steps import (
    floors,
    step_candidates,
    step_loop,
    step_time,
    timing,
    torch_peers,
    train_step,
)
from benchmarks.training import models
from mars_optax._src import execute
from tests.benchmarks import flags
from tests.support import interpreter

_RESULTS = pathlib.Path(step_time.__file__).parents[1] / "results"
_CANDIDATES = {one.name: one for one in step_candidates.candidates()}


def candidate_and_state(name: str, params):
    candidate = _CANDIDATES[name]
    transformation = candidate.build(params)
    return candidate, transformation, jax.eval_shape(transformation.init, params)


class FloorsTest(parameterized.TestCase):
    # A 10 x 6 kernel and a bias of 6, all in float32, counted by hand in bytes: MARS's rule for the
    # kernel, AdamW's 28 B for each element of the bias.
    @parameterized.named_parameters(
        ("adamw", "adamw", 66 * 28),
        ("lion", "lion", 66 * 20),
        ("mars", "mars", 60 * 40 + 6 * 28),
        ("mars_no_clip", "mars_no_clip", 60 * 32 + 6 * 28),
        ("mars_bf16_prev_grad", "mars_bf16_prev_grad", 60 * 38 + 6 * 28),
        ("mars_memory_free", "mars_memory_free", 66 * 28),
        ("mars_lion", "mars_lion", 60 * 32 + 6 * 28),
        ("mars_shampoo", "mars_shampoo", 60 * 32 + 6 * 28),
        ("mars_m", "mars_m", 60 * 32 + 6 * 28),
        ("muon", "muon", 60 * 20 + 6 * 28),
    )
    def test_bytes_are_those_counted_by_hand(self, name: str, expected: int):
        params = {"kernel": jnp.zeros((10, 6)), "bias": jnp.zeros(6)}
        candidate, _, state = candidate_and_state(name, params)
        counted = floors.step_bytes(params, state, clipped=candidate.clipped)
        self.assertEqual(counted, expected)

    @parameterized.named_parameters(
        ("adamw", "adamw", 28),
        ("mars", "mars", 44),
        ("mars_no_clip", "mars_no_clip", 36),
        ("mars_bf16_prev_grad", "mars_bf16_prev_grad", 38),
        ("mars_lion", "mars_lion", 36),
        ("mars_memory_free", "mars_memory_free", 28),
    )
    def test_a_donated_state_has_its_previous_gradient_written(self, name: str, expected: int):
        params = {"kernel": jnp.zeros((10, 6))}
        candidate, _, state = candidate_and_state(name, params)
        counted = floors.step_bytes(params, state, clipped=candidate.clipped, donated=True)
        self.assertEqual(counted, 60 * expected)

    def test_8_bit_previous_gradients_are_written_with_their_scales(self):
        params = {"kernel": jnp.zeros((10, 6))}
        state = mars_optax.scale_by_mars(prev_grad_dtype="float8_e4m3fn").init(params)
        # Per element 28 without prev; prev is read twice and written once, the gradient read
        # once more; of the ten rows' scales each 4 B is read and written.
        expected = 60 * (28 + 3 + 4) + 10 * 8
        self.assertEqual(floors.step_bytes(params, state, clipped=True), expected)

    def test_a_torch_optimizer_is_counted_as_its_twin(self):
        params = {"kernel": jnp.zeros((10, 6)), "bias": jnp.zeros(6)}
        self.assertEqual(torch_peers.step_bytes("torch_adamw_fused", params), 66 * 28)
        self.assertEqual(torch_peers.step_bytes("timm_mars", params), 60 * 40 + 6 * 28)
        self.assertEqual(torch_peers.step_bytes("pytorch_optimizer_soap", params), 66 * 28)

    def test_previous_gradients_are_found_in_wrappers_and_not_by_a_parameters_name(self):
        params = {"prev_grad": jnp.zeros((3, 2)), "other": jnp.zeros(2)}
        transformation = optax.chain(
            optax.clip_by_global_norm(1.0), optax.contrib.reduce_on_plateau(), mars_optax.mars(0.1)
        )
        state = jax.eval_shape(transformation.init, params)
        found = [index for index in floors.previous_gradients(state, params) if index is not None]
        self.assertEqual(found, [1])
        adam = optax.adam(0.1).init(params)
        self.assertEqual(set(floors.previous_gradients(adam, params)), {None})

    @parameterized.named_parameters(("flat", "flat"), ("stacked", "stacked"))
    def test_newton_schulz_of_gpt2_small(self, layout: str):
        params = gpt2_shapes.shapes("small", layout)
        numbers = gpt2_shapes.dimension_numbers(params, embeddings=False)
        # Per layer 768 x 2304, 768 x 768 and twice 768 x 3072: with m = 768 the long sides are 3m,
        # m, 4m and 4m, so that 4 m^2 n + 2 m^3 is (14 + 6 + 18 + 18) m^3.
        expected = 12 * 5 * 56 * 768**3
        self.assertEqual(floors.newton_schulz_flops(params, numbers), expected)


class ShapesTest(parameterized.TestCase):
    # 124.4, 354.8, 774.0 and 1557.6 million are the sizes of the released models.
    @parameterized.parameters(
        ("small", 124_439_808, 148),
        ("medium", 354_823_168, 292),
        ("large", 774_030_080, 436),
        ("xl", 1_557_611_200, 580),
    )
    def test_gpt2_has_its_sizes(self, model: str, parameters: int, leaves: int):
        flat = gpt2_shapes.shapes(model, "flat")
        stacked = gpt2_shapes.shapes(model, "stacked")
        self.assertEqual(gpt2_shapes.parameters(flat), parameters)
        self.assertEqual(gpt2_shapes.parameters(stacked), parameters)
        self.assertLen(jax.tree.leaves(flat), leaves)
        self.assertLen(jax.tree.leaves(stacked), 16)

    def test_only_embeddings_and_kernels_are_matrices_in_both_layouts(self):
        for layout, matrices in (("flat", 2 * 4), ("stacked", 4)):
            params = gpt2_shapes.shapes("tiny", layout)
            for embeddings in (False, True):
                _, _, state = candidate_and_state("mars" if embeddings else "mars_m", params)
                found = floors.previous_gradients(state, params)
                self.assertLen(
                    [index for index in found if index is not None], matrices + 2 * embeddings
                )

    def test_numbers_differ_between_leaves_and_seeds(self):
        tree = {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 64))}
        first, second = (gpt2_shapes.normal(tree, 0.5, seed) for seed in (0, 1))
        self.assertAlmostEqual(float(first["a"].std()), 0.5, delta=0.05)
        self.assertGreater(np.abs(first["a"] - first["b"]).mean(), 0.1)
        self.assertGreater(np.abs(first["a"] - second["a"]).mean(), 0.1)

    def test_the_trained_model_is_gpt2_small(self):
        config = models.GPTConfig(50257, 1024, 768, 12, 12, biases=True, tied=True)
        model = models.abstract_model(config)[1]
        self.assertEqual(gpt2_shapes.parameters(model), 124_439_808)


_SHAPES = {"first": {"kernel": (256, 128)}, "second": {"kernel": (128, 256), "bias": (128,)}}


def trees():
    """Parameters, gradients and previous gradients, as NumPy arrays."""
    abstract = jax.tree.map(
        lambda shape: jax.eval_shape(lambda: jnp.zeros(shape)),
        _SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return [gpt2_shapes.normal(abstract, 0.02, seed) for seed in range(3)]


class LoopTest(parameterized.TestCase):
    def compiled(self, name: str):
        params, _, _ = trees()
        candidate, transformation, state = candidate_and_state(name, params)
        return step_loop.compile_loop(candidate.step(transformation), params, state, 4)[1]

    @parameterized.parameters("adamw", "mars", "mars_no_clip")
    def test_the_loop_neither_copies_nor_leaves_work_outside(self, name: str):
        figures = self.compiled(name)
        # A parameter-sized copy has at least the bytes of the smallest leaf; counters have less.
        self.assertLess(figures["copied_bytes"], 128 * 4)
        self.assertEqual(figures["hoisted_arrays"], 0)
        self.assertGreaterEqual(figures["kernels"], 3)

    def test_the_checks_notice_a_loop_without_these_cares(self):
        params, grads, _ = map(functools.partial(jax.tree.map, jnp.asarray), trees())
        transformation = _CANDIDATES["mars"].build(params)
        state = transformation.init(params)

        def naive(params, state, grads):
            def body(_, carry):
                updates, state = transformation.update(grads, carry[1], carry[0])
                return optax.apply_updates(carry[0], updates), state

            return jax.lax.fori_loop(0, 4, body, (params, state))

        text = jax.jit(naive, donate_argnums=(0, 1)).lower(params, state, grads).compile().as_text()
        matrices = 4 * (256 * 128 + 128 * 256)
        self.assertGreaterEqual(step_loop.loop_report(text).copied_bytes, matrices)

        # With invariant gradients and no barrier, what the clip needs is computed before the loop.
        with mock.patch.object(step_loop, "_barrier", lambda values: values):
            self.assertGreater(self.compiled("mars")["hoisted_arrays"], 0)

    def test_the_clips_norms_are_computed_in_the_loop(self):
        self.assertGreater(
            self.compiled("mars")["kernels"], self.compiled("mars_no_clip")["kernels"]
        )

    @parameterized.parameters("mars", "mars_bf16_prev_grad")
    def test_the_loop_does_the_steps_that_it_stands_for(self, name: str):
        params, grads, prev_grads = map(functools.partial(jax.tree.map, jnp.asarray), trees())
        candidate, transformation, _ = candidate_and_state(name, params)
        state = transformation.init(params)
        carry = step_loop.Carry.of(state, params)
        loop = step_loop.build_loop(candidate.step(transformation), carry, 3)
        outside = carry.outside(prev_grads)
        self.assertLen(outside, 2 if name == "mars" else 0)
        looped, _ = jax.jit(loop)(params, carry.carried(state), grads, outside)
        expected = params
        for _ in range(3):
            state = carry.whole(carry.carried(state), outside)
            updates, state = transformation.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
        # One rounding of an update of 1e-4 in another order, three times.
        chex.assert_trees_all_close(looped, expected, atol=1e-8, rtol=1e-6)
        moved = jnp.abs(looped["first"]["kernel"] - params["first"]["kernel"])
        self.assertGreater(float(jnp.max(moved)), 1e-4)

    def test_times_are_of_one_step_and_of_all_repeats(self):
        params, grads, prev_grads = map(functools.partial(jax.tree.map, jnp.asarray), trees())
        step = lambda grads, state, params: (params, state)  # noqa: E731
        times = mock.Mock(side_effect=[8.0, 4.0, 40.0])
        with mock.patch.object(timing, "milliseconds", times):
            figures = step_loop.measure(
                step, params, lambda params: (), grads, prev_grads, steps=4, repeats=3
            )
        self.assertEqual([figures[key] for key in ("ms_min", "ms", "ms_max")], [1.0, 2.0, 10.0])

    @parameterized.parameters(*step_loop.PROGRAMS)
    def test_parameters_that_are_not_finite_are_no_result(self, program: str):
        def step(grads, state, params):
            return jax.tree.map(lambda p: p * jnp.inf, params), state

        params, grads, prev_grads = map(functools.partial(jax.tree.map, jnp.array), trees())
        with self.assertRaisesRegex(FloatingPointError, "Expected finite parameters"):
            step_loop.measure(
                step,
                params,
                lambda params: (),
                grads,
                prev_grads,
                steps=2,
                repeats=1,
                program=program,
            )


class StepTest(parameterized.TestCase):
    def test_a_step_called_from_python_advances_the_state_in_its_own_buffers(self):
        params, grads, prev_grads = map(functools.partial(jax.tree.map, jnp.array), trees())
        candidate, transformation, _ = candidate_and_state("mars", params)
        states, results = [], []

        def init(params):
            states.append(transformation.init(params))
            return states[0]

        def milliseconds(run):
            # As `run` gives its buffers up again, what is looked at are copies.
            results.append(jax.tree.map(jnp.array, run()))
            return 8.0

        with mock.patch.object(timing, "milliseconds", milliseconds):
            figures = step_loop.measure(
                candidate.step(transformation),
                params,
                init,
                grads,
                prev_grads,
                steps=2,
                repeats=2,
                program="step",
            )
        for leaf in jax.tree.leaves((params, states[0])):
            self.assertTrue(leaf.is_deleted())
        # Once to warm up, then two measurements.
        for call, (moved, state) in enumerate(results, start=2):
            counts = optax.tree.get_all_with_path(state, "count")
            self.assertNotEmpty(counts)
            for _, count in counts:
                self.assertEqual(int(count), 2 * call)
            self.assertFalse(
                bool(jnp.all(moved["first"]["kernel"] == trees()[0]["first"]["kernel"]))
            )
        # The gradients of every other step, and they are still there.
        (kept,) = [kept for _, kept in optax.tree.get_all_with_path(results[-1][1], "prev_grad")]
        chex.assert_trees_all_equal(kept["first"]["kernel"], prev_grads["first"]["kernel"])
        self.assertFalse(jax.tree.leaves(prev_grads)[0].is_deleted())
        self.assertAlmostEqual(figures["ms"], 8.0 / 2)

    def test_all_of_the_state_is_written_where_it_was(self):
        params, _, _ = trees()
        for name in ("adamw", "mars", "mars_m"):
            candidate, transformation, state = candidate_and_state(name, params)
            compiled, _ = step_loop.compile_step(candidate.step(transformation), params, state)
            given = jax.tree.leaves((params, state))
            header = compiled.as_text().partition("\n")[0]
            aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
            self.assertEqual(aliases, [(str(i), str(i)) for i in range(len(given))], name)

    def test_kernels_and_copies_are_those_of_the_program(self):
        params, _, _ = trees()
        swapped = lambda grads, state, params: (state, params)  # noqa: E731
        _, figures = step_loop.compile_step(swapped, params, params)
        leaves = 4 * (256 * 128 + 128 * 256 + 128)
        self.assertGreaterEqual(figures["copied_bytes"], leaves)
        self.assertGreaterEqual(figures["kernels"], 3)
        halved = lambda grads, state, params: (jax.tree.map(lambda p: p / 2, params), state)  # noqa: E731
        _, figures = step_loop.compile_step(halved, params, params)
        self.assertEqual(figures["copied_bytes"], 0)


class HloTest(absltest.TestCase):
    def test_inner_loops_calls_and_fusions_are_counted_as_often_as_they_run(self):
        text = """HloModule example, is_scheduled=true

%copying (p: f32[4,2]) -> f32[4,2] {
  %p = f32[4,2]{1,0} parameter(0)
  ROOT %copy.9 = f32[4,2]{1,0} copy(%p)
}

%inner_body (t: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %t = (s32[], f32[4,2]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4,2]{1,0} get-tuple-element(%t), index=1
  %dot = f32[4,2]{1,0} custom-call(%x), custom_call_target="gemm"
  ROOT %r = (s32[], f32[4,2]{1,0}) tuple(%i, %dot)
}

%called (y: bf16[8]) -> bf16[8] {
  %y = bf16[8]{0} parameter(0)
  ROOT %copy.1 = bf16[8]{0} copy(%y)
}

%body (c: (s32[], f32[4,2], /*index=2*/bf16[8])) -> (s32[], f32[4,2], bf16[8]) {
  %c = (s32[], f32[4,2]{1,0}, /*index=2*/bf16[8]{0}) parameter(0)
  %one = s32[] constant(1)
  %g = f32[4,2]{1,0} get-tuple-element(%c), index=1
  %start = (s32[], f32[4,2]{1,0}) tuple(%one, %g)
  %while.1 = (s32[], f32[4,2]{1,0}) while(%start), condition=%cond, body=%inner_body, \
backend_config={"known_trip_count":{"n":"5"}}
  %z = bf16[8]{0} get-tuple-element(%c), index=2
  %w = bf16[8]{0} call(%z), to_apply=%called
  %v = f32[4,2]{1,0} fusion(%g), kind=kLoop, calls=%copying
  ROOT %out = (s32[], f32[4,2]{1,0}, bf16[8]{0}) tuple(%one, %v, %w)
}

ENTRY %main (a: f32[4,2]) -> f32[4,2] {
  %a = f32[4,2]{1,0} parameter(0)
  %loop = (s32[], f32[4,2]{1,0}, bf16[8]{0}) while(%init), condition=%cond2, body=%body
  ROOT %end = f32[4,2]{1,0} get-tuple-element(%loop), index=1
}
"""
        report = step_loop.loop_report(text)
        expected = step_loop.LoopReport(
            kernels=5 + 1 + 1, copied_bytes=16 + 32, carried=3, iterations=None
        )
        self.assertEqual(report, expected)

    def test_without_a_loop_there_is_nothing_to_report(self):
        text = jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()
        with self.assertRaisesRegex(ValueError, "Expected HLO with a loop"):
            step_loop.loop_report(text)


_CEILINGS = {"copy_bytes_per_second": 1e9, "bfloat16_matmul_flop_per_second": 1e12}


class ReportTest(parameterized.TestCase):
    def row(self, name: str, ms: float, **more):
        return {
            "name": name,
            "model": "small",
            "layout": "flat",
            "parameters": 1000,
            "leaves": 3,
            "ms": ms,
            "ms_min": ms,
            "ms_max": ms,
            "floor_bytes": 28_000,
            "newton_schulz_flops": 0,
        } | more

    def test_shares_and_ratios(self):
        rows = [
            self.row("torch_adamw_fused", 0.05),
            self.row("adamw", 0.1),
            self.row("adamw", 0.07, layout="stacked"),
            self.row("mars_m", 0.14, layout="stacked", newton_schulz_flops=7 * 10**6),
            {"name": "mars", "model": "small", "layout": "stacked", "error": "RuntimeError: full"},
        ]
        completed = step_time.complete(rows, _CEILINGS)
        mars_m = completed[3]
        self.assertAlmostEqual(mars_m["share_of_floor"], 0.028 / 0.14)
        self.assertAlmostEqual(mars_m["share_of_matmul"], 0.007 / 0.14)
        self.assertAlmostEqual(mars_m["over_adamw"], 0.14 / 0.07)
        self.assertAlmostEqual(mars_m["over_torch"], 0.14 / 0.05)
        self.assertAlmostEqual(completed[1]["over_torch"], 2.0)
        self.assertNotIn("share_of_matmul", completed[1])
        self.assertEqual(completed[4], rows[4])

    def test_ratios_are_to_the_baseline_in_the_same_program(self):
        rows = [
            self.row("torch_adamw_fused", 0.05),
            self.row("adamw", 0.1, program="loop"),
            self.row("adamw", 0.2, program="step"),
            self.row("mars", 0.3, program="step"),
        ]
        mars = step_time.complete(rows, _CEILINGS)[3]
        self.assertAlmostEqual(mars["over_adamw"], 0.3 / 0.2)
        self.assertAlmostEqual(mars["over_torch"], 0.3 / 0.05)

    @parameterized.parameters(
        (["loop", "step"], [("torch", None), ("adamw", "loop"), ("adamw", "step")]),
        (["step"], [("adamw", "step")]),
    )
    def test_pytorchs_rows_are_measured_once_beside_the_loop(self, programs, expected):
        adamw = [_CANDIDATES["adamw"]]
        with (
            mock.patch.object(step_time, "_torch_names", return_value=["torch"]),
            mock.patch.object(step_time, "_torch_row", return_value={"ms": 1.0}),
            mock.patch.object(step_time, "_jax_row", return_value={"ms": 1.0}),
        ):
            rows = list(step_time.rows(["tiny"], ["flat"], programs, adamw, [], inner=2, repeats=1))
        self.assertEqual([(row["name"], row.get("program")) for row in rows], expected)

    def test_without_the_baseline_there_is_no_ratio(self):
        (row,) = step_time.complete([self.row("mars", 0.1)], _CEILINGS)
        self.assertNotIn("over_adamw", row)

    def test_training_steps_are_compared_in_percent(self):
        rows = [
            {"name": "sgd", "ms": 100.0, "model_flop_per_second": 4e11},
            {"name": "adamw", "ms": 104.0, "model_flop_per_second": 4e11},
            {"name": "mars", "error": "RuntimeError: full"},
        ]
        completed = step_time.complete_training(rows, _CEILINGS)
        self.assertAlmostEqual(completed[1]["percent_over_sgd"], 4.0)
        self.assertAlmostEqual(completed[1]["share_of_matmul"], 0.4)
        self.assertEqual(completed[2], rows[2])

    def test_model_operations(self):
        config = models.GPTConfig(50257, 1024, 768, 12, 12, biases=True, tied=True)
        work = models.Work(config, batch=480, microbatch=16)
        self.assertEqual(work.tokens, 480 * 1024)
        # Forward and backward make 3 times 2 operations a parameter; Q K^T and its product with V
        # make 2 x 2 x width x context a layer and token, again three times.
        per_token = 6 * 124_439_808 + 3 * 12 * 4 * 768 * 1024
        self.assertEqual(work.model_flops(124_439_808), 480 * 1024 * per_token)
        with self.assertRaisesRegex(ValueError, "multiple of the microbatch, got 10 and 4"):
            models.Work(config, batch=10, microbatch=4)


def squared_rows(model: nnx.Embed, windows: jax.Array) -> jax.Array:
    """Stands for the GPT's loss: it compiles in no time."""
    return jnp.mean(jnp.square(model(windows)))


class TrainStepTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(models, "loss", squared_rows))
        self.config = models.GPTConfig(16, 8, 8, 1, 2)
        self.model = nnx.split(nnx.eval_shape(lambda: nnx.Embed(16, 4, rngs=nnx.Rngs(0))))

    def test_microbatches_give_the_clipped_gradient_of_the_batch(self):
        graph, abstract = self.model
        params = jax.tree.map(jnp.asarray, gpt2_shapes.normal(abstract, 10.0, 0))
        tokens = np.random.default_rng(0).integers(16, size=(4, 9)).astype(np.int32)
        gradient = jax.grad(lambda p: squared_rows(nnx.merge(graph, p), tokens))(params)
        norm = optax.tree.norm(gradient)
        self.assertGreater(float(norm), 1.0)
        for shape in ((1, 4, 9), (2, 2, 9), (4, 1, 9)):
            work = models.Work(self.config, batch=4, microbatch=shape[1])
            candidate = step_candidates.Candidate("gradient", lambda params: optax.sgd(1.0))
            transformation, train = train_step.build_step(graph, candidate, params, work)
            new, _ = train(params, transformation.init(params), jnp.asarray(tokens.reshape(shape)))
            moved = jax.tree.map(jnp.subtract, params, new)
            # What is left of float32 when 1 is taken off parameters of up to 50.
            clipped = jax.tree.map(lambda g: g / norm, gradient)
            chex.assert_trees_all_close(moved, clipped, atol=1e-5)

    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    def test_only_a_fused_step_has_the_kernels_of_one(self):
        """As on one Hopper GPU, with the interpreter in the place of the GPU."""
        # As many scales and as many biases as share a kernel.
        model = nnx.eval_shape(
            lambda: nnx.Sequential(*(nnx.LayerNorm(128, rngs=nnx.Rngs(0)) for _ in range(8)))
        )
        graph, params = nnx.split(model)
        work = models.Work(self.config, batch=4, microbatch=4)
        windows = jax.eval_shape(lambda: jnp.zeros((1, 4, 128)))
        for name, kernels in (("mars", 0), ("mars/fused", 1), ("adamw/fused", 0)):
            transformation, train = train_step.build_step(graph, _CANDIDATES[name], params, work)
            state = jax.eval_shape(transformation.init, params)
            pays = mock.patch.object(execute, "kernels_are_faster", return_value=True)
            with interpreter.always(), pays:
                jaxpr = str(jax.make_jaxpr(train)(params, state, windows))
            self.assertEqual(jaxpr.count("name=mars_step"), kernels, name)

    def test_figures_are_of_one_step(self):
        work = models.Work(self.config, batch=4, microbatch=2)
        candidates = [_CANDIDATES["adamw"]]
        # In turns: sgd's, adamw's, sgd's and so on, of 2 steps.
        times = mock.Mock(side_effect=[2.0, 20.0, 4.0, 40.0, 12.0, 120.0])
        with (
            mock.patch.object(models, "abstract_model", return_value=self.model),
            mock.patch.object(timing, "milliseconds", times),
        ):
            sgd, adamw = train_step.measure(candidates, work, steps=2, repeats=3)
        self.assertEqual([sgd[key] for key in ("ms_min", "ms", "ms_max")], [1.0, 2.0, 6.0])
        self.assertEqual([adamw[key] for key in ("ms_min", "ms", "ms_max")], [10.0, 20.0, 60.0])
        self.assertEqual(sgd["model_flop_per_second"], 1000 * work.model_flops(64) / 2.0)

    def test_an_optimizer_that_fails_is_reported_and_the_others_survive(self):
        broken = step_candidates.Candidate("broken", mock.Mock(side_effect=RuntimeError("full")))
        infinite = step_candidates.Candidate("infinite", lambda params: optax.scale(jnp.inf))
        work = models.Work(self.config, batch=4, microbatch=2)
        with mock.patch.object(models, "abstract_model", return_value=self.model):
            rows = train_step.measure(
                [broken, infinite, _CANDIDATES["mars"]], work, steps=2, repeats=3
            )
        self.assertEqual([row["name"] for row in rows], ["sgd", "broken", "infinite", "mars"])
        self.assertEqual(rows[1]["error"], "RuntimeError: full")
        self.assertStartsWith(rows[2]["error"], "FloatingPointError: Expected finite parameters")
        self.assertNotIn("ms", rows[2])
        for row in (rows[0], rows[3]):
            self.assertNotIn("error", row)
            self.assertEqual((row["parameters"], row["tokens"]), (64, 32))
            self.assertAlmostEqual(row["tokens_per_second"], 1000 * 32 / row["ms"])


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.result = folder / "out" / "results.json"
        ceilings = {**_CEILINGS, "copy_size_bytes": 1, "matmul_edge": 1}
        self.enterContext(mock.patch("benchmarks.steps.timing.ceilings", return_value=ceilings))

    def run_command(self, *arguments: str) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            step_time.main(flags.last(f"--out={self.result.parent}", "--repeats=2", *arguments))
        return output.getvalue()

    def test_a_run_writes_every_figure_and_draws_them(self):
        printed = self.run_command(
            "--layouts=stacked", "--optimizers=adamw,mars,mars_m", "--steps=2", "--commit=abc"
        )
        tree = json.loads(self.result.read_text())
        self.assertEqual(tree["environment"]["commit"], "abc")
        self.assertContainsSubset(
            {"device", "jax", "jaxlib", "optax", "mars_optax", "backend"}, tree["environment"]
        )
        names = [row["name"] for row in tree["rows"]]
        self.assertEqual(names, ["adamw", "mars", "mars_m"])
        for row in tree["rows"]:
            self.assertNotIn("error", row)
            self.assertLessEqual(row["ms_min"], row["ms"])
            self.assertLessEqual(row["ms"], row["ms_max"])
            self.assertGreater(row["share_of_floor"], 0)
            if not row["newton_schulz_flops"]:
                # Newton-Schulz has constants, multiples of the identity, that are made once.
                self.assertEqual(row["hoisted_arrays"], 0)
            self.assertGreater(row["kernels"], 0)
            self.assertGreater(row["compile_seconds"], 0)
            self.assertGreater(row["trace_seconds"], 0)
            self.assertIsInstance(row["temporary_bytes"], int)
            self.assertEqual((row["leaves"], row["parameters"]), (16, 136_960))
        self.assertEqual(tree["rows"][0]["over_adamw"], 1.0)
        self.assertGreater(tree["rows"][2]["share_of_matmul"], 0)
        self.assertIn("tiny, stacked, loop: 136,960 parameters in 16 leaves", printed)
        self.assertRegex(printed, r"\nmars_m +\d")
        self.run_command(f"--plot={self.result}")
        self.assertStartsWith(self.result.with_suffix(".png").read_bytes(), b"\x89PNG")

    def test_a_step_called_from_python_is_a_row_of_its_own(self):
        printed = self.run_command(
            "--programs=loop,step", "--layouts=stacked", "--optimizers=adamw,mars", "--steps=2"
        )
        rows = json.loads(self.result.read_text())["rows"]
        found = [(row["program"], row["name"]) for row in rows]
        self.assertEqual(found, [(p, n) for p in ("loop", "step") for n in ("adamw", "mars")])
        for row in rows:
            self.assertNotIn("error", row)
            self.assertLessEqual(row["ms_min"], row["ms"])
            self.assertGreater(row["kernels"], 0)
            self.assertGreater(row["compile_seconds"], 0)
            self.assertGreater(row["trace_seconds"], 0)
            self.assertIsInstance(row["temporary_bytes"], int)
            self.assertIsInstance(row["copied_bytes"], int)
            self.assertGreater(row["share_of_floor"], 0)
        params = gpt2_shapes.shapes("tiny", "stacked")
        matrices = gpt2_shapes.dimension_numbers(params, embeddings=True)
        kept = jax.tree.map(lambda p, its: 4 * p.size * (its is not None), params, matrices)
        floor = {found: row["floor_bytes"] for found, row in zip(found, rows, strict=True)}
        self.assertEqual(floor["step", "adamw"], floor["loop", "adamw"])
        self.assertEqual(floor["step", "mars"] - floor["loop", "mars"], sum(jax.tree.leaves(kept)))
        self.assertEqual(rows[2]["over_adamw"], 1.0)
        for program in ("loop", "step"):
            self.assertIn(f"tiny, stacked, {program}: 136,960 parameters", printed)
        self.run_command(f"--plot={self.result}")
        self.assertStartsWith(self.result.with_suffix(".png").read_bytes(), b"\x89PNG")

    def test_results_from_before_there_were_programs_are_of_the_loop(self):
        recorded = (_RESULTS / "step_time_small_h100.json").read_text()
        self.assertNotIn('"program"', recorded)
        self.assertIn("small, stacked, loop: 124,439,808", step_time.text(json.loads(recorded)))
        self.result.parent.mkdir()
        self.result.write_text(recorded)
        self.run_command(f"--plot={self.result}")
        self.assertStartsWith(self.result.with_suffix(".png").read_bytes(), b"\x89PNG")

    def test_whole_training_steps_are_measured_with_every_implementation(self):
        failed = {"name": "sgd", "parameters": 1, "tokens": 1, "error": "RuntimeError: full"}
        measure = mock.Mock(return_value=[failed])
        with mock.patch.object(train_step, "measure", measure):
            self.run_command("--train_step", "--implementations=default,xla,pallas")
        names = {one.name for one in measure.call_args.args[0]}
        ours = {
            f"{name}{implementation}{fused}"
            for name in ("mars", "mars_m")
            for implementation in ("", "/xla", "/pallas")
            for fused in ("", "/fused")
        }
        self.assertEqual(names, {"adamw", "adamw/fused", "muon", *ours})

    def test_what_is_no_result_cannot_be_drawn(self):
        self.result.parent.mkdir()
        row = {"name": "mars", "model": "tiny", "layout": "flat", "ms": 1.0}
        for tree, message in (
            ({"records": []}, "a list `rows`, got none"),
            ([], "a list `rows`, got none"),
            ({"rows": []}, "rows with figures to draw, got none"),
            ({"rows": [row]}, "rows with `share_of_floor`, got others"),
        ):
            self.result.write_text(json.dumps(tree))
            with self.assertRaisesRegex(SystemExit, f"as --plot, got '{self.result}'.*{message}"):
                self.run_command(f"--plot={self.result}")
        self.result.write_text("no JSON")
        with self.assertRaisesRegex(SystemExit, f"as --plot, got '{self.result}': Expecting"):
            self.run_command(f"--plot={self.result}")

    def test_a_row_that_fails_is_reported_and_the_others_survive(self):
        build = mock.Mock(side_effect=RuntimeError("RESOURCE_EXHAUSTED: no memory\nfor this"))
        listed = [
            step_candidates.Candidate("broken", build),
            _CANDIDATES["adamw"],
            step_candidates.candidates(["pallas"])[3],
        ]
        with mock.patch.object(step_candidates, "candidates", return_value=listed):
            printed = self.run_command("--layouts=stacked", "--optimizers=broken,adamw,mars/pallas")
        broken, adamw, pallas = json.loads(self.result.read_text())["rows"]
        self.assertEqual(broken["error"], "RuntimeError: RESOURCE_EXHAUSTED: no memory")
        self.assertNotIn("ms", broken)
        self.assertGreater(adamw["ms"], 0)
        self.assertIn("broken: no figures. RuntimeError: RESOURCE_EXHAUSTED: no memory", printed)
        # Either there are kernels for this device, or the row says why there are none.
        self.assertEqual(pallas["name"], "mars/pallas")
        if "ms" not in pallas:
            self.assertStartsWith(pallas["error"], "NotImplementedError: `implementation`")

    def test_what_was_measured_before_a_crash_is_on_disk(self):
        def rows(*args, **kwargs):
            yield {"name": "mars", "model": "tiny", "layout": "flat", "error": "X: y"}
            raise KeyboardInterrupt

        with mock.patch.object(step_time, "rows", rows), self.assertRaises(KeyboardInterrupt):
            self.run_command()
        self.assertLen(json.loads(self.result.read_text())["rows"], 1)

    @pytest.mark.slow  # It compiles a model; TrainStepTest has the same with another loss.
    def test_training_steps(self):
        printed = self.run_command(
            "--train_step", "--batch_size=4", "--microbatch=2", "--steps=2", "--optimizers=adamw"
        )
        rows = json.loads(self.result.read_text())["training"]
        self.assertEqual([row["name"] for row in rows], ["sgd", "adamw"])
        for row in rows:
            self.assertNotIn("error", row)
            self.assertIn("percent_over_sgd", row)
            self.assertEqual(row["tokens"], 4 * 64)
        self.assertEqual(rows[1]["percent_over_adamw"], 0.0)
        self.assertIn("% over adamw", printed)

    def test_fused_steps_are_rows_of_their_own_where_the_package_has_them(self):
        def fused_step(tx, grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with mock.patch.object(mars_optax, "fused_step", fused_step, create=True):
            names = [one.name for one in step_candidates.candidates(["default", "xla"])]
            self.run_command("--layouts=stacked", "--optimizers=adamw/fused", "--steps=2")
        self.assertContainsSubset({"adamw/fused", "mars/fused", "mars/xla/fused"}, names)
        (row,) = json.loads(self.result.read_text())["rows"]
        self.assertGreater(row["ms"], 0)

    @parameterized.named_parameters(
        ("model", ["--model=huge"], "--model: Expected some of tiny"),
        ("models", ["--train_step", "--model=tiny,mini"], "one --model beside --train_step"),
        ("layout", ["--layouts=round"], "--layouts: Expected some of flat"),
        ("program", ["--programs=scan"], "--programs: Expected some of loop, step"),
        ("implementation", ["--implementations=triton"], "--implementations: Expected some of"),
        ("no_row", ["--optimizers=adamw,nothing"], "got 'nothing'. Correct --optimizers"),
        ("out", ["--out="], "a folder that can be made as --out"),
        ("batch", ["--train_step", "--batch_size=3", "--microbatch=2"], "multiple of the micro"),
        ("plot", ["--plot=nowhere.json"], "nowhere.json"),
        ("cudnn", ["--train_step", "--attention=cudnn"], "--attention=xla where there is no GPU"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, arguments: list[str], message: str):
        with self.assertRaisesRegex(SystemExit, "step_time: .*" + re.escape(message)):
            self.run_command(*arguments)
        self.assertFalse(self.result.exists())


if __name__ == "__main__":
    absltest.main()
