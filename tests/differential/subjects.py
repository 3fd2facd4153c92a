"""The optimizers that every situation is crossed with, and the plain training they are held to."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mars_optax

STEPS = 2  # the second corrects by the gradient of the first
LEARNING_RATE = 0.1


def params(dtype: Any = "float32") -> dict[str, jax.Array]:
    """A matrix and a vector, new at every call: some situations donate them."""
    rng = np.random.default_rng(0)
    shapes = {"b": (4,), "w": (8, 4)}
    return {k: jnp.asarray(rng.uniform(0.5, 1.5, s), dtype) for k, s in shapes.items()}


def gradient(params: Any) -> Any:
    """The gradient of `loss`: of norm below 1, so that no clip hides what the correction does."""
    return jax.tree.map(lambda p: p * 0.2 - 0.1, params)


def loss(params: Any) -> Any:
    """A quadratic function of the parameters."""
    return sum((0.1 * p * p - 0.1 * p).sum() for p in jax.tree.leaves(params))


@dataclasses.dataclass(frozen=True)
class Subject:
    """An optimizer with a setting of its own.

    Attributes:
      factory: Makes it of `learning_rate`, `kwargs`, and the arguments that a situation adds.
      is_ours: Whether it is of this package; else it is one of Optax, the measure.
      slow: Whether it is left out of the quick tests.
      evaluates: Whether its `update` wants a `grad_fn`.
      tolerance: What two compilations of one training may differ by.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    is_ours: bool = True
    slow: bool = False
    evaluates: bool = False
    tolerance: float = 1e-5

    @functools.cached_property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, one object for all situations, so that what is compiled is shared."""
        return self.make(LEARNING_RATE)

    def make(self, learning_rate: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        """A new one."""
        return self.factory(learning_rate=learning_rate, **{**self.kwargs, **kwargs})

    def accepts(self, argument: str) -> bool:
        """Whether the factory has an argument of this name."""
        return argument in inspect.signature(self.factory).parameters

    @property
    def extra(self) -> dict[str, Any]:
        """What `update` is called with besides gradients, state and parameters."""
        return {"grad_fn": gradient} if self.evaluates else {}


def step_of(subject: Subject, tx: Any = None, **extra: Any) -> Callable[[Any, Any], tuple]:
    """`(params, state) -> (params, state)` of one step on `loss`."""
    tx = subject.tx if tx is None else tx

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient(params), state, params, **subject.extra, **extra)
        return optax.apply_updates(params, updates), state

    return step


def train(
    subject: Subject,
    start: Any = None,
    *,
    tx: Any = None,
    wrap: Callable[[Any], Any] = jax.jit,
    steps: int = STEPS,
    **extra: Any,
) -> Any:
    """The parameters after some steps of `step_of`, wrapped by `wrap`."""
    tx = subject.tx if tx is None else tx
    now = params() if start is None else start
    step, state = wrap(step_of(subject, tx, **extra)), tx.init(now)
    for _ in range(steps):
        now, state = step(now, state)
    return now


def eagerly(subject: Subject, start: Any = None, **kwargs: Any) -> Any:
    """`train` without `jax.jit`."""
    return train(subject, start, wrap=lambda step: step, **kwargs)


@functools.cache
def plain(subject: Subject) -> Any:
    """What a situation is compared with, unless it says otherwise."""
    return jax.device_get(train(subject))


def _scale_by_mars(learning_rate: Any) -> Any:
    return optax.chain(mars_optax.scale_by_mars(), optax.scale_by_learning_rate(learning_rate))


def _factored(learning_rate: Any) -> Any:
    return optax.chain(_FACTORED["inner"], optax.scale_by_learning_rate(learning_rate))


def _links(learning_rate: Any, eps_root: float = 0.0) -> Any:
    return optax.chain(
        mars_optax.correct_gradients(),
        mars_optax.clip_by_leaf_norm(),
        optax.adamw(learning_rate, eps_root=eps_root),
    )


# Newton-Schulz in bfloat16, the default: rounded elsewhere where the program is another.
_BFLOAT16 = 4e-3

OPTAX = (
    Subject("adamw", optax.adamw, is_ours=False),
    Subject("lion", optax.lion, is_ours=False),
    Subject("muon", optax.contrib.muon, is_ours=False),
)
# `gamma` is named because `inject_hyperparams` has to leave it a number.
_ALONE = {
    "gamma": 0.025,
    "max_norm": None,
    "second_moment": "gradient",
    "keep_prev_grad": False,
}
_EIGHT_BITS = {"prev_grad_dtype": "float8_e4m3fn"}
# Of the longer side the gradient fills only a part: any basis of the rest is one of eigenvectors.
# The second step changes the bases. Its gradient is the first one, as the first step moves nothing:
# with a small epsilon the direction would be signs alone, whatever the correction.
_SOAP = {"one_sided": True, "precondition_frequency": 1, "max_precond_dim": 8, "eps": 0.1}
# Its state has two vectors for a matrix.
_FACTORED = {"inner": optax.scale_by_factored_rms(min_dim_size_to_factor=4)}

OURS = (
    Subject("mars", mars_optax.mars),
    Subject("mars_m", mars_optax.mars_m, tolerance=_BFLOAT16),
    Subject("mars_lion", mars_optax.mars_lion, slow=True),
    Subject("mars_shampoo", mars_optax.mars_shampoo, {"ns_dtype": "float32"}, slow=True),
    Subject("mars_soap", mars_optax.mars_soap, _SOAP, slow=True),
    Subject("variance_reduced", mars_optax.variance_reduced, _FACTORED, slow=True),
    Subject("storm_adamw", mars_optax.storm_adamw, slow=True, evaluates=True),
    Subject("mars_exact", mars_optax.mars, {"correction": "exact"}, slow=True, evaluates=True),
    Subject("mars_without_prev_grad", mars_optax.mars, _ALONE, slow=True),
    Subject("mars_m_8_bits", mars_optax.mars_m, _EIGHT_BITS, slow=True, tolerance=_BFLOAT16),
    Subject("scale_by_mars", _scale_by_mars, slow=True),
    Subject("links", _links, slow=True),
)
# What of Optax a subject has inside, by itself.
INSIDE = {"links": OPTAX[0], "variance_reduced": Subject("factored", _factored, is_ours=False)}
EVALUATING = tuple(subject.name for subject in OURS if subject.evaluates)
