"""The NumPy oracle reproduces the recorded trajectories and Newton-Schulz results.

The other parity tests rest on it: random cases are compared with the oracle alone.
"""

import numpy as np
from absl.testing import absltest, parameterized

from tests.support import goldens, numpy_reference

TRAJECTORIES = [name for name in goldens.names() if not name.startswith("newton_schulz")]

# The oracle has no cautious mask; it changes the parameters only, so the state is still compared.
CAUTIOUS = ("timm_adamw__caution__mixed", "pytorch_optimizer_adamw__cautious__mixed")


def _adamw_extras(golden: goldens.Golden) -> dict:
    """Where each implementation puts eps."""
    if golden.impl == "pytorch_optimizer":
        return {"eps_root": 1e-15, "eps_before_correction": True}
    return {"eps_before_correction": golden.impl.startswith("official_mars_m")}


def replay(golden: goldens.Golden, leaf: str) -> numpy_reference.Trajectory:
    """The oracle's run of one leaf of a recorded case."""
    h = golden.group(leaf)
    param, grads = golden.init[leaf], golden.grads[leaf]
    lr = golden.learning_rates() if golden.meta["lr_per_step"] else h["lr"]
    is_matrix = leaf in golden.matrices
    extra = {} if golden.ns_dtype is None else {"ns_dtype": golden.ns_dtype}
    # In the exact cases the gradient of the same batch at the parameters before is recorded.
    extra["prev_grads"] = golden.prev_grads.get(leaf) if golden.meta["mode"] == "exact" else None
    if golden.impl.startswith("official_mars_m"):
        if not is_matrix:
            b1, b2 = h["adamw_betas"]
            return numpy_reference.adamw_leaf(
                param,
                grads,
                lr=lr,
                b1=b1,
                b2=b2,
                eps=h["adamw_eps"],
                weight_decay=h["wd"],
                **_adamw_extras(golden),
            )
        common = {
            "lr": lr,
            "b1": h["momentum"],
            "gamma": h["gamma"],
            "weight_decay": h["wd"],
            "ns_steps": h["ns_steps"],
            **extra,
        }
        if golden.impl == "official_mars_m_efficient":
            del common["prev_grads"]
            return numpy_reference.mars_m_efficient_leaf(param, grads, **common)
        return numpy_reference.mars_leaf(param, grads, rule="mars_m", **common)
    b1_1d, b2_1d = h["betas_1d"] or h["betas"]
    amsgrad = h.get("amsgrad", h.get("ams_bound", False))
    if not is_matrix:
        return numpy_reference.adamw_leaf(
            param,
            grads,
            lr=lr * np.float64(golden.meta["lr_1d_factor"]),
            b1=b1_1d,
            b2=b2_1d,
            eps=h["eps"],
            weight_decay=h.get("weight_decay_1d", h["weight_decay"]),
            amsgrad=amsgrad,
            **_adamw_extras(golden),
        )
    rule = h["mars_type"].removeprefix("mars-")
    shape = param.shape
    if rule == "shampoo" and param.ndim != 2:
        if golden.impl == "pytorch_optimizer":
            param, grads = param.reshape(shape[0], -1), grads.reshape(len(grads), shape[0], -1)
        else:
            rule = "adamw"
    run = numpy_reference.mars_leaf(
        param,
        grads,
        rule=rule,
        lr=lr,
        b1=h["betas"][0],
        b2=h["betas"][1],
        eps=h["eps"],
        gamma=golden.gammas(),
        weight_decay=h["weight_decay"],
        first_step="no_correction" if golden.impl == "timm" else "zeros",
        amsgrad=amsgrad,
        **_adamw_extras(golden),
        **extra,
    )
    reshape = {"params": run.params.reshape(-1, *shape), "mu": run.mu.reshape(shape)}
    return run._replace(**reshape, prev_grad=run.prev_grad.reshape(shape))


class NumpyReferenceTest(parameterized.TestCase):
    @parameterized.parameters(*TRAJECTORIES)
    def test_trajectory_is_reproduced(self, name):
        golden = goldens.load(name)
        params_tol, state_tol = (1e-13, 1e-13) if golden.is_float64 else (1e-6, 4e-6)
        compared = 0
        for leaf in golden.leaves:
            run = replay(golden, leaf)
            rounded = golden.ns_dtype == "bfloat16" and leaf in golden.matrices
            if name not in CAUTIOUS and not rounded:
                goldens.assert_close(
                    run.params, golden.params[leaf], rtol=0, atol=params_tol, what=f"{leaf} params"
                )
            for field in ("mu", "nu", "nu_max", "prev_grad"):
                if field == "prev_grad" and golden.meta["mode"] == "exact":
                    continue  # It is of the batch that comes after the last step.
                recorded = golden.state.get(field, {}).get(leaf)
                ours = getattr(run, field)
                if recorded is None or ours is None:
                    continue
                compared += 1
                goldens.assert_close(ours, recorded, rtol=0, atol=state_tol, what=f"{leaf} {field}")
        self.assertGreater(compared, 0)

    @parameterized.product(order=("mars", "mars_m"), kind=("f64", "f32", "bf16"))
    def test_newton_schulz_is_reproduced(self, order, kind):
        meta, arrays = goldens.load_newton_schulz(f"newton_schulz__{order}")
        dtype = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}[kind]
        # bfloat16 rounds where the recorded code rounds, so that it agrees bit for bit.
        # In float64 seven steps amplify rounding noise by up to 3.4445^7, about 6e3.
        tol = {"f64": 1e-11, "f32": 1e-5, "bf16": 0.0}[kind]
        for label in meta["labels"]:
            if kind == "f32" and label in ("rank1", "graded"):
                continue  # five steps amplify float32 rounding noise by up to 3.4445^5, about 485
            for steps in meta["steps"]:
                actual = numpy_reference.newton_schulz(
                    arrays[f"in/{label}"], steps=steps, eps=meta["eps"], order=order, dtype=dtype
                )
                expected = arrays[f"out_{kind}/{steps}/{label}"]
                goldens.assert_close(actual, expected, rtol=0, atol=tol, what=f"{label} {steps}")

    def test_recorded_gradients_stand_in_for_the_previous_ones(self):
        rng = np.random.default_rng(0)
        param, grads = rng.normal(size=(4, 3)), rng.normal(size=(5, 4, 3))
        shifted = np.concatenate([np.zeros((1, 4, 3)), grads[:-1]])
        stored = numpy_reference.mars_leaf(param, grads, rule="adamw", lr=0.1)
        given = numpy_reference.mars_leaf(param, grads, rule="adamw", lr=0.1, prev_grads=shifted)
        np.testing.assert_array_equal(stored.params, given.params)
        other = numpy_reference.mars_leaf(param, grads, rule="adamw", lr=0.1, prev_grads=grads)
        self.assertGreater(np.max(np.abs(stored.params - other.params)), 1e-3)


if __name__ == "__main__":
    absltest.main()
