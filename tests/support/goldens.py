"""Reads the recorded trajectories of `tests/data`, whose README describes the format.

Names here are ours: the state's entries are `mu`, `nu`, `nu_max` and `prev_grad` whatever the
recorded implementation calls them. Arrays stay in PyTorch's orientation until `oriented`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"

_STATE_NAMES = {
    "exp_avg": "mu",
    "momentum_buffer": "mu",
    "moment1": "mu",
    "exp_avg_sq": "nu",
    "moment2": "nu",
    "max_exp_avg_sq": "nu_max",
    "last_grad": "prev_grad",
}


@dataclasses.dataclass(frozen=True)
class Golden:
    """One recorded trajectory; the dictionaries are keyed by the parameter's name."""

    name: str
    meta: dict[str, Any]
    init: dict[str, np.ndarray]  # (*shape)
    grads: dict[str, np.ndarray]  # (steps, *shape)
    params: dict[str, np.ndarray]  # (steps, *shape), after each step
    state: dict[str, dict[str, np.ndarray]]  # state[field][leaf], after the last step
    prev_grads: dict[str, np.ndarray]  # closed loop: (steps, *shape)
    extra: dict[str, np.ndarray]  # closed loop: "data/x", "data/y", "loss"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return self.meta["hyperparameters"]

    @property
    def impl(self) -> str:
        return self.meta["impl"]

    @property
    def leaves(self) -> list[str]:
        return self.meta["param_names"]

    @property
    def matrices(self) -> list[str]:
        """The leaves that took the variance-reduced branch, of whatever rank."""
        return self.meta["mars_params"]

    @property
    def is_float64(self) -> bool:
        return self.meta["dtype"] == "float64"

    @property
    def ns_dtype(self) -> str | None:
        """Precision of Newton-Schulz; None where nothing is orthogonalized."""
        recorded = self.meta["newton_schulz"]
        return recorded and recorded["dtype"]

    def learning_rates(self) -> np.ndarray:
        """The constructor's or, where one was recorded, the schedule's rate at each step."""
        lr = self.meta["lr_per_step"]
        return np.broadcast_to(lr or self.hyperparameters["lr"], (self.meta["steps"],))

    def gammas(self) -> np.ndarray:
        gamma = self.meta["gamma_per_step"]
        return np.broadcast_to(gamma or self.hyperparameters["gamma"], (self.meta["steps"],))

    def group(self, leaf: str) -> dict[str, Any]:
        """The hyperparameters that hold for a leaf, its group's overrides included."""
        values = dict(self.hyperparameters)
        for group in self.meta["groups"] or ():
            if leaf in group["params"]:
                values |= {key: value for key, value in group.items() if key != "params"}
        return values


def names() -> list[str]:
    """Every file of the data directory, without its suffix."""
    return sorted(path.stem for path in DATA.glob("*.npz"))


@functools.cache
def load(name: str) -> Golden:
    """Reads a trajectory; float64 cases are cast up, as their inputs are stored in float32."""
    with np.load(DATA / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    meta = json.loads(str(arrays["meta"]))
    dtype = np.dtype(meta["dtype"])
    leaves = meta["param_names"]
    state: dict[str, dict[str, np.ndarray]] = {}
    for leaf in leaves:
        for recorded, ours in _STATE_NAMES.items():
            if (key := f"state/{leaf}/{recorded}") in arrays:
                state.setdefault(ours, {})[leaf] = arrays[key]
    return Golden(
        name=name,
        meta=meta,
        init={leaf: arrays[f"init/{leaf}"].astype(dtype) for leaf in leaves},
        grads={leaf: arrays[f"grads/{leaf}"].astype(dtype) for leaf in leaves},
        params={leaf: arrays[f"params/{leaf}"] for leaf in leaves},
        state=state,
        prev_grads={
            leaf: arrays[key] for leaf in leaves if (key := f"grads_prev/{leaf}") in arrays
        },
        extra={
            key: arrays[key].astype(dtype) for key in ("data/x", "data/y", "loss") if key in arrays
        },
    )


def loss_of(golden: Golden) -> Callable[[Any, Any, Any], jax.Array]:
    """The loss of a closed-loop case, as a function of parameters, inputs and targets.

    Its weights multiply from the right: they are (in, out) already.
    """

    def predicted(params: Any, x: Any) -> jax.Array:
        match golden.meta["problem"]["kind"]:
            case "linreg":
                return x @ params["w"] + params["b"]
            case "mlp":
                hidden = jnp.tanh(x @ params["w1"] + params["b1"])
                mixed = jnp.sum(jnp.tanh(jnp.einsum("ni,kij->knj", hidden, params["mix"])), axis=0)
                return params["gain"] * (mixed @ params["w2"]) + params["b2"]
            case unknown:
                raise ValueError(unknown)

    def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.sum((predicted(params, x) - y) ** 2) / (2 * len(x))

    return loss_fn


@functools.cache
def load_newton_schulz(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads a file that holds Newton-Schulz alone: its metadata and its arrays."""
    with np.load(DATA / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "meta"}
        return json.loads(str(file["meta"])), arrays


def oriented(x: np.ndarray, rank: int) -> np.ndarray:
    """Turns PyTorch's (out, in) into (in, out), or back; other ranks are left as they are.

    Args:
      x: A leaf, or a leaf with a leading axis of steps.
      rank: Rank of the leaf.

    Returns:
      The leaf with its matrix axes exchanged if it has rank 2.
    """
    return np.swapaxes(x, -1, -2) if rank == 2 else x


def state_by_field(state: Any) -> dict[str, dict[str, Any]]:
    """Finds {field: {leaf: array}} in any nesting of states over a dictionary of parameters."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        leaves = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if fields and leaves and fields[-1] in ("mu", "nu", "nu_max", "prev_grad"):
            found.setdefault(fields[-1], {})[leaves[-1]] = value
    return found


def assert_close(
    actual: np.ndarray, expected: np.ndarray, *, rtol: float, atol: float, what: str
) -> None:
    """Compares with `atol` measured in units of the largest expected entry."""
    expected = np.asarray(expected, np.float64)
    largest = float(np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=rtol, atol=atol * largest, err_msg=what
    )
