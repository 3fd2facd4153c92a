"""The optimizers' settings, and how they are named on the command line."""

import dataclasses
import functools
import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks.training import curves, models, optimizers
from tests.support import versions

_CONFIG = models.GPTConfig(vocabulary_size=11, context=5, width=8, layers=1, heads=2)


@functools.cache
def jitted_updates(name: str):
    """Returns a function of two scales: the updates for a gradient of each, stacked."""
    optimizer = optimizers.parse_optimizer(name)
    params = nnx.state(models.GPT(_CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda leaf: np.float32(rng.normal(size=(2, *leaf.shape))), params)

    def updates(scales: jax.Array):
        transformation = optimizer.transformation(optax.constant_schedule(1.0))

        def step(state, inputs):
            scale, grads = inputs
            scaled = jax.tree.map(lambda leaf: scale * leaf, grads)
            # The parameters do not move, so neither does the gradient of this batch at them.
            updates, state = transformation.update(
                scaled, state, params, grad_fn=lambda _: optimizer.clip(scaled)
            )
            return state, updates

        updates = jax.lax.scan(step, transformation.init(params), (scales, grads))[1]
        return nnx.to_pure_dict(updates)

    return jax.jit(updates)


def updates(name: str, *scales: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the first and the second update by leaf path, at learning rate 1."""
    stacked = jitted_updates(name)(jnp.asarray(scales))
    flat = jax.tree_util.tree_flatten_with_path(stacked)[0]
    first, second = (
        {jax.tree_util.keystr(path): np.asarray(leaf[index]) for path, leaf in flat}
        for index in range(2)
    )
    return first, second


def without_decay(name: str) -> str:
    settings = optimizers.OPTIMIZERS[name].settings
    return ":".join([name, *(f"{key}=0" for key in settings if key.startswith("weight_decay"))])


class OptimizersTest(parameterized.TestCase):
    @parameterized.parameters(*optimizers.OPTIMIZERS)
    def test_every_optimizer_has_the_global_clip_in_front(self, name: str):
        versions.skip_if_optax_lacks(name)
        # The first gradient is small, so the second one's scale shows wherever it is not clipped.
        one, two, unclipped = (
            updates(without_decay(name), 1e-2, scale)[1] for scale in (10.0, 1e3, 1e-2)
        )
        # In SOAP's eigenbases small entries of a turned gradient are rounded as the large ones are.
        atol = 1e-4 if name == "mars_soap" else 1e-6
        for path in one:
            np.testing.assert_allclose(one[path], two[path], rtol=1e-4, atol=atol)
        self.assertTrue(any(np.abs(one[path] - unclipped[path]).max() > 1e-3 for path in one))

    @parameterized.parameters("muon", "mars_m", "mars_shampoo")
    def test_embeddings_and_output_layer_get_the_adamw_rule(self, name: str):
        versions.skip_if_optax_lacks(name)
        first = updates(without_decay(name), 1.0, 1.0)[0]
        # The first step of AdamW has one size in all its entries, up to eps beside the smallest
        # gradients. (It is not the learning rate under Muon: Optax hands Nesterov on to AdamW.)
        sizes = {path: np.abs(update) for path, update in first.items()}
        adamw = {path for path, size in sizes.items() if size.max() / size.min() < 1.01}
        vectors = {path for path, update in first.items() if update.ndim < 2}
        outside = {
            path for path in first if path.startswith(("['embed']", "['position_", "['head']"))
        }
        self.assertLen(outside, 3)
        self.assertLen(vectors, 3)
        self.assertEqual(adamw, outside | vectors)

    @parameterized.parameters("mars", "mars_lion")
    def test_elementwise_variants_treat_embeddings_as_matrices(self, name: str):
        first = updates(without_decay(name), 1.0, 1.0)[0]
        full, half = (
            np.abs(first[path]).max() for path in ("['embed']['embedding']", "['norm']['scale']")
        )
        self.assertAlmostEqual(full, 1.0, delta=1e-3)
        self.assertAlmostEqual(half, 0.5, delta=1e-3)

    def test_nadamw_has_nesterov_momentum(self):
        first = updates(without_decay("nadamw"), 1.0, 1.0)[0]
        # The gradient's share, and that of the momentum as the next step would correct its bias.
        expected = 1 + 0.9 * (1 - 0.9) / (1 - 0.9**2)
        self.assertAlmostEqual(np.abs(first["['head']['kernel']"]).max(), expected, places=4)

    def test_muon_is_given_corrected_gradients_whose_leaves_are_clipped(self):
        optimizer = optimizers.parse_optimizer("corrected_muon:global_clip=none")
        with mock.patch.object(optax.contrib, "muon", return_value=optax.identity()):
            transformation = optimizer.transformation(optax.constant_schedule(1.0))
        params = {"kernel": jnp.full((2, 2), 0.1), "scale": jnp.zeros(2)}
        state = transformation.update(params, transformation.init(params), params)[1]
        grads = {"kernel": jnp.full((2, 2), 0.2), "scale": jnp.asarray([3.0, 4.0])}
        given, _ = transformation.update(grads, state, params)
        # 0.2 + gamma b1 / (1 - b1) times what it grew by, of norm below 1; the scale's is above.
        expected = 0.2 + 0.025 * 0.95 / 0.05 * 0.1
        np.testing.assert_allclose(given["kernel"], np.full((2, 2), expected), rtol=1e-5)
        np.testing.assert_allclose(given["scale"], [0.6, 0.8], rtol=1e-5)

    def test_gradients_that_a_step_asks_for_are_clipped(self):
        def build(*_: Any) -> optax.GradientTransformationExtraArgs:
            return optax.GradientTransformationExtraArgs(
                lambda params: optax.EmptyState(),
                lambda grads, state, params, *, grad_fn, **_: (grad_fn(params), state),
            )

        asking = dataclasses.replace(optimizers.parse_optimizer("mars"), build=build)
        params = {"kernel": jnp.full((2, 2), 3.0)}
        schedule = optax.constant_schedule(1.0)
        state = asking.transformation(schedule).init(params)
        after, _ = asking.step(schedule, lambda params: params, params, state, params)
        # The gradient at the parameters is they themselves, of norm 6.
        np.testing.assert_allclose(after["kernel"], np.full((2, 2), 3.5), rtol=1e-6)

    @parameterized.parameters(("adamw", "mars"), ("lion", "mars_lion"), ("muon", "mars_m"))
    def test_pairs_share_their_weight_decay(self, baseline: str, variant: str):
        ours = optimizers.OPTIMIZERS[variant].settings
        theirs = optimizers.OPTIMIZERS[baseline].settings
        self.assertEqual(ours["weight_decay"], theirs["weight_decay"])
        decay_1d = theirs.get("weight_decay_1d", theirs["weight_decay"])
        self.assertEqual(ours["weight_decay_1d"], decay_1d)


class ParseTest(parameterized.TestCase):
    def test_mars_and_adamw_share_their_betas(self):
        ours = optimizers.OPTIMIZERS["mars"].settings
        theirs = optimizers.OPTIMIZERS["adamw"].settings
        self.assertEqual((ours["b1"], ours["b2"]), (theirs["b1"], theirs["b2"]))

    def test_settings_behind_the_name_replace_the_defaults(self):
        optimizer = optimizers.parse_optimizer("mars:gamma=0.5:max_norm=none")
        self.assertEqual(optimizer.name, "mars:gamma=0.5:max_norm=none")
        self.assertEqual(optimizer.settings["gamma"], 0.5)
        self.assertIsNone(optimizer.settings["max_norm"])
        self.assertEqual(optimizer.settings["weight_decay"], 0.1)
        self.assertEqual(optimizers.OPTIMIZERS["mars"].settings["gamma"], 0.025)

    @parameterized.parameters("mars", "mars_m", "corrected_muon")
    def test_a_gamma_may_follow_from_the_gradients(self, base: str):
        versions.skip_if_optax_lacks(base)
        (optimizer,) = optimizers.parse_optimizers([f"{base}:gamma=adaptive"])
        self.assertEqual(optimizer.settings["gamma"], "adaptive")
        params = {"blocks": {"0": {"kernel": jnp.eye(2)}}}
        state = optimizer.transformation(optax.constant_schedule(1.0)).init(params)
        (rule,) = optax.tree.get_all_with_path(state, "gamma_state")
        self.assertEqual(len(jax.tree.leaves(rule[1])), 4)
        self.assertIn("gamma adaptive", curves.row_name(optimizer))

    def test_a_domain_has_defaults_of_its_own_and_the_users_settings_go_first(self):
        domain = optimizers.Domain(
            optimizers.LANGUAGE.matrices,
            learning_rates={"mars": 0.5},
            settings={"global_clip": None, "b1": 0.8, "gamma": 0.3},
            settings_of={"mars": {"b2": 0.7}},
        )
        mars = optimizers.parse_optimizer("mars:b1=0.6", domain)
        names = ("global_clip", "b1", "b2")
        self.assertEqual([mars.settings[name] for name in names], [None, 0.6, 0.7])
        self.assertEqual((mars.learning_rate, mars.base), (0.5, "mars"))
        self.assertEqual(mars.settings["gamma"], 0.3)
        self.assertNotIn("gamma", optimizers.parse_optimizer("lion", domain).settings)

    def test_without_the_global_clip_gradients_are_left_as_they_are(self):
        grads = {"blocks": {"0": {"kernel": jnp.full((2, 2), 3.0)}}}
        clipped = optimizers.parse_optimizer("mars").clip(grads)
        self.assertAlmostEqual(float(optax.tree.norm(clipped)), 1.0, places=6)
        whole = optimizers.parse_optimizer("mars:global_clip=none").clip(grads)
        self.assertEqual(float(optax.tree.norm(whole)), 6.0)

    def test_what_the_benchmark_leaves_at_its_default_can_be_set(self):
        optimizer = optimizers.parse_optimizer("mars_m:ns_steps=3:ns_coeffs=polar_express")
        own = optimizers.OPTIMIZERS["mars_m"].settings
        expected = {**own, "ns_steps": 3, "ns_coeffs": "polar_express"}
        self.assertEqual(optimizer.settings, expected)
        self.assertIsInstance(optimizer.settings["ns_steps"], int)
        self.assertLen(optimizers.parse_optimizers(optimizers.table("mars_m/iterations")), 6)

    def test_a_setting_reaches_the_optimizer(self):
        first = updates(without_decay("mars") + ":learning_rate_1d=2", 1.0, 1.0)[0]
        self.assertAlmostEqual(np.abs(first["['norm']['scale']"]).max(), 2.0, delta=0.01)

    @parameterized.parameters(
        ("adam", "Expected an optimizer out of adamw, .*got 'adam'"),
        ("", "got ''"),
        ("adamw:beta1=0.9", "setting of adamw out of b1, b2.*got 'beta1'"),
        ("adamw:learning_rate=1", "--learning_rates"),
        ("mars:gamma=big", "Expected a finite number or 'none' for gamma.*got 'big'"),
        ("mars:gamma", "got ''"),
        ("mars:b1=nan", "Expected a finite number or 'none' for b1 in 'mars:b1=nan', got 'nan'"),
        ("mars:gamma=inf", "got 'inf'.*--optimizers"),
        ("storm_adamw:correction_clip=inf", "finite number or 'none' for correction_clip"),
        ("mars:keep_prev_grad=1", "Expected 'true' or 'false' for keep_prev_grad.*got '1'"),
        ("mars:global_clip=-1", "positive number or 'none' for global_clip.*--optimizers"),
        ("mars:global_clip=0", "in 'mars:global_clip=0', got 0.0"),
        ("mars_m:ns_steps=3.5", "Expected a whole number or 'none' for ns_steps.*got '3.5'"),
        ("mars:b1=2", "Expected b1 from 0 to below 1 in 'mars:b1=2', got 2"),
        ("mars:max_norm=none:max_norm=1", "Expected each setting once"),
    )
    def test_a_wrong_optimizer_is_an_error(self, text: str, message: str):
        with self.assertRaisesRegex(ValueError, message):
            optimizers.parse_optimizer(text)

    @parameterized.parameters(
        ("mars:max_norm=-1", "expected a number > 0"),
        ("mars:gamma=none", "got None"),
        ("storm_adamw:gamma=adaptive", "got AdaptiveGamma"),
        ("mars:prev_grad_dtype=foo", "expected a dtype"),
        ("lion:b1=none", "NoneType"),
        ("mars:learning_rate_1d=none", "NoneType"),
    )
    def test_a_value_that_an_optimizer_does_not_take_is_an_error(self, text: str, reason: str):
        message = f"got '{text}': .*{reason}.*Correct --optimizers"
        with self.assertRaisesRegex(ValueError, message):
            optimizers.parse_optimizers(["adamw", text])

    @parameterized.parameters(
        ("mars:global_clip=0.5", "global_clip", 0.5),
        ("storm_adamw:correction_clip=1.0", "correction_clip", 1.0),
        ("mars:max_norm=1", "max_norm", 1.0),
        ("mars:prev_grad_dtype=bfloat16", "prev_grad_dtype", "bfloat16"),
        ("mars:keep_prev_grad=true", "keep_prev_grad", True),
    )
    def test_a_setting_without_a_default_is_a_number_or_a_word(
        self, text: str, setting: str, value: Any
    ):
        domain = dataclasses.replace(optimizers.LANGUAGE, settings={"global_clip": None})
        (optimizer,) = optimizers.parse_optimizers([text], domain)
        self.assertEqual(optimizer.settings[setting], value)
        self.assertIs(type(optimizer.settings[setting]), type(value))

    @parameterized.parameters(([],), (["adamw", "mars", "adamw"],))
    def test_no_optimizer_and_the_same_one_twice_are_errors(self, texts: list[str]):
        with self.assertRaisesRegex(ValueError, "each named once"):
            optimizers.parse_optimizers(texts)

    def test_the_first_of_equal_settings_is_kept_and_other_optimizers_with_them_are(self):
        names = ["adamw", "nadamw", "mars:b1=0.9:gamma=0.025", "mars", "mars:gamma=0"]
        kept, notes = optimizers.distinct([optimizers.parse_optimizer(name) for name in names])
        self.assertEqual([optimizer.name for optimizer in kept], [*names[:3], names[4]])
        self.assertEqual(
            notes, ["`mars` is left out: its settings are those of `mars:b1=0.9:gamma=0.025`."]
        )

    def test_learning_rates_come_back_sorted(self):
        self.assertEqual(optimizers.parse_learning_rates(["4e-3", "0.001"]), [0.001, 0.004])
        self.assertEqual(optimizers.parse_learning_rates(["1e30", "1e-30"]), [1e-30, 1e30])

    def test_no_learning_rate_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "Expected learning rates .*got ''"):
            optimizers.parse_learning_rates([])

    @parameterized.parameters("fast", "0", "-1e-3", "nan", "inf", "", "1e-31", "1e31")
    def test_a_malformed_learning_rate_is_an_error(self, text: str):
        with self.assertRaisesRegex(
            ValueError, f"learning rates from 1e-30 to 1e\\+30.*got '{text}'"
        ):
            optimizers.parse_learning_rates(["1e-3", text])

    def test_a_repeated_learning_rate_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "differ"):
            optimizers.parse_learning_rates(["1e-3", "0.001"])


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("adamw:b1=2", "Expected b1 from 0 to below 1"),
        ("muon:beta=1", "Expected beta from 0 to below 1"),
        ("adamw:weight_decay=-1", "Expected weight_decay from 0"),
        ("mars:gamma=0.1:gamma=0.2", "Expected each setting once"),
    )
    def test_a_setting_out_of_range_or_given_twice_is_an_error(self, text: str, message: str):
        with self.assertRaisesRegex(ValueError, message):
            optimizers.parse_optimizer(text)

    @parameterized.parameters(*optimizers.OPTIMIZERS)
    def test_every_setting_can_be_written_and_holds_those_that_are_set(self, name: str):
        chosen = optimizers.parse_optimizer(name)
        every = json.loads(json.dumps(chosen.every_setting()))
        self.assertContainsSubset(chosen.settings.keys(), every.keys())
        for key, value in chosen.settings.items():
            self.assertEqual(every[key], value)
        self.assertTrue({"eps", "eps_1d", "mu_dtype"} & every.keys())
        self.assertNotIn("adam_b1", every)


if __name__ == "__main__":
    absltest.main()
