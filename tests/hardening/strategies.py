"""What the properties are checked on: trees, their values, and settings of the optimizers.

Examples are the same in every run. `MARS_OPTAX_PROPERTY_SEED` chooses others, and
`MARS_OPTAX_PROPERTY_EXAMPLES` how many.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support.nodes import CallableDense, Dense, Pair

# Few shapes and dtypes: run operation by operation, an example then finds its programs compiled.
SHAPES = ((), (0,), (7,), (1, 1), (5, 3), (0, 4), (2, 3, 5), (1, 2, 1, 3, 2))
DTYPES = ("float32", "bfloat16", "float16", "complex64")
SCALES = (1e-30, 1e-8, 1.0, 1e8, 1e30)
OPTIMIZERS = ("mars", "mars_lion", "mars_shampoo", "mars_m", "storm_adamw")


def examples(count: int, **strategies: Any) -> Callable[[Any], Any]:
    """As `hypothesis.given`, with a fixed seed and number of examples.

    Args:
      count: The number of examples.
      **strategies: Those of the test's arguments.
    """
    seed = int(os.environ.get("MARS_OPTAX_PROPERTY_SEED", "0"))
    count = int(os.environ.get("MARS_OPTAX_PROPERTY_EXAMPLES", count))

    def decorate(test: Any) -> Any:
        given = hypothesis.given(**strategies)(test)
        return hypothesis.seed(seed)(hypothesis.settings(max_examples=count)(given))

    return decorate


@jax.tree_util.register_pytree_with_keys_class
class Labelled:
    """A node of our own, with children under keys that are no strings, and something static."""

    def __init__(self, children: Any, label: str = "label") -> None:
        self.children, self.label = tuple(children), label

    def tree_flatten_with_keys(self) -> Any:
        keys = (jax.tree_util.FlattenedIndexKey(i) for i in range(len(self.children)))
        return tuple(zip(keys, self.children, strict=True)), (self.label, len(self.children))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Labelled":
        return cls(children, aux[0])


class Leaf(NamedTuple):
    """What a leaf is to be; no tree itself where it is wrapped in a `Box`."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Box:
    """A leaf of a skeleton."""

    leaf: Leaf


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree's skeleton, and what fills it."""

    skeleton: Any
    seed: int
    scale: float

    def params(self) -> Any:
        """Parameters of the size of 1."""
        return self._filled(self.seed, 1.0)

    def grads(self, step: int, times: float = 1.0) -> Any:
        """The gradients of a step, in the parameters' dtypes."""
        return self._filled(self.seed + 1 + step, self.scale * times)

    def leaves(self) -> list[Leaf]:
        """What its leaves are."""
        return [box.leaf for box in jax.tree.leaves(self.skeleton)]

    def _filled(self, seed: int, scale: float) -> Any:
        rng = np.random.default_rng(seed)

        def fill(box: Box) -> jax.Array:
            # No 0, at which a scaling law has nothing to say with an epsilon of 0.
            def draw() -> np.ndarray:
                shape = box.leaf.shape
                return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.1, 1.0, shape)

            values = draw() + 1j * draw() if box.leaf.dtype == "complex64" else draw()
            return jnp.asarray(scale * values, box.leaf.dtype)

        return jax.tree.map(fill, self.skeleton)


def trees(
    dtypes: tuple[str, ...] = DTYPES, scales: tuple[float, ...] = SCALES
) -> st.SearchStrategy[Tree]:
    """Trees of every kind of node, deep or bare, with leaves of these dtypes."""
    leaves = st.builds(
        lambda shape, dtype: Box(Leaf(shape, dtype)),
        st.sampled_from(SHAPES),
        st.sampled_from(dtypes),
    )
    # Made anew each time: JAX and Hypothesis leave them alone, but who knows of an optimizer.
    nothing = st.sampled_from((lambda: None, dict, tuple, list)).map(lambda make: make())

    def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(("a", "b", "z/y", "0")), inner, min_size=1),
            st.builds(Pair, inner, inner),
            st.builds(Dense, inner, inner),
            st.builds(CallableDense, inner, inner, inner),
            st.builds(Labelled, st.lists(inner, max_size=3)),
        )

    skeletons = st.recursive(leaves | nothing, nodes, max_leaves=6)
    # No parameters at all are None to Optax.
    skeletons = skeletons.filter(lambda tree: tree is not None)
    return st.builds(_fitting, skeletons, st.integers(0, 1000), st.sampled_from(scales))


def _fitting(skeleton: Any, seed: int, scale: float) -> Tree:
    """A tree whose gradients its dtypes can hold: float16 ends at 6.5e4."""
    dtypes = {box.leaf.dtype for box in jax.tree.leaves(skeleton)}
    return Tree(skeleton, seed, min(scale, 1e3) if "float16" in dtypes else scale)


@dataclasses.dataclass(frozen=True)
class Setting:
    """An optimizer's name and arguments."""

    name: str
    kwargs: Mapping[str, Any]

    def make(self, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with some arguments replaced."""
        return getattr(mars_optax, self.name)(**{"learning_rate": 0.1, **self.kwargs, **overrides})


def _gamma_crossing_zero(count: Any) -> Any:
    return 0.1 - 0.1 * count


@st.composite
def settings(
    draw: st.DrawFn, names: tuple[str, ...] = OPTIMIZERS, *, clipped: bool = True
) -> Setting:
    """Settings of the optimizers.

    Args:
      draw: Hypothesis's.
      names: Of these.
      clipped: Whether there may be a clip.
    """

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    name = one_of(*names)
    kwargs = {
        "b1": one_of(0.95, 0.0, 0.5),
        "gamma": one_of(0.025, 0.0, -0.05, 0.5, _gamma_crossing_zero),
        "weight_decay": one_of(0.0, 0.1),
        "mu_dtype": one_of(None, "bfloat16", "float32"),
    }
    if name == "storm_adamw":
        kwargs["nesterov"] = one_of(False, True)
        kwargs["correction_clip"] = one_of(None, 1.0) if clipped else None
        return Setting(name, kwargs)
    kwargs |= {
        "weight_decay_1d": one_of(0.0, 0.1),
        "first_step": one_of("zeros", "no_correction"),
        # By default, a matrix for each slice of all leading axes, or one whose axes lie apart.
        "weight_dimension_numbers": one_of(
            None, MuonDimensionNumbers(-2, -1), MuonDimensionNumbers(0, -1)
        ),
    }
    form = one_of("buffer", "buffer", "exact", "none", "memory_free")
    kwargs["max_norm"] = one_of(1.0, None, 1e-3) if clipped and form != "memory_free" else None
    if form == "buffer":
        kwargs["prev_grad_dtype"] = one_of(None, "bfloat16", "float8_e4m3fn")
    elif form in ("exact", "none"):
        kwargs["correction"] = form
    else:
        kwargs["keep_prev_grad"] = False
    if name == "mars":
        kwargs["nu_dtype"] = one_of(None, "bfloat16")
        kwargs["second_moment"] = (
            "gradient" if form == "memory_free" else one_of("corrected", "gradient")
        )
    if name in ("mars", "mars_shampoo"):
        kwargs["amsgrad"] = one_of(False, True)
    if name == "mars" or (name != "mars_m" and form != "memory_free"):
        kwargs["optimize_1d"] = one_of(False, True)
    if name in ("mars_shampoo", "mars_m"):
        kwargs["ns_dtype"] = one_of("float32", "bfloat16")
        kwargs["ns_coeffs"] = one_of("quintic", "polar_express")
    return Setting(name, kwargs)
