"""The table of everything that is an optimizer or a transformation: enrol once, get every test.

The contract tests are crossed over `ENTRIES`. An entry names a public factory, the arguments it is
built with and the kind of parameter tree it is run on. A new variant or option gets one more line.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import mars_optax

Kind = Literal["optimizer", "direction", "link"]

_SHAPES: Mapping[str, dict[str, Any]] = {
    # A matrix of each orientation, a vector and a scalar.
    "mixed": {
        "embed": (5, 4),
        "layer": {"bias": (6,), "kernel": (4, 6)},
        "scale": (),
    },
    "matrices": {"tall": (6, 4), "wide": {"kernel": (3, 5)}},
    # A stack of three kernels and the stack of their biases, whose rank says nothing.
    "stacked": {"bias": (3, 5), "kernel": (3, 4, 5), "scale": (4,)},
    "stack": {"kernel": (3, 4, 5)},
}

_STACK = MuonDimensionNumbers(1, 2)
_STACKED_SPECS = {"bias": None, "kernel": _STACK, "scale": None}


def _build(shapes: Any, dtype: str, rng: np.random.Generator) -> Any:
    if isinstance(shapes, dict):
        return {name: _build(inner, dtype, rng) for name, inner in shapes.items()}
    values = rng.standard_normal(shapes)
    if np.issubdtype(np.dtype(jnp.dtype(dtype)), np.complexfloating):
        values = values + 1j * rng.standard_normal(shapes)
    return jnp.asarray(values, dtype)


def _stacked_specs(params: Any) -> Any:
    """The specs of the "stacked" tree as a callable of the parameters."""
    del params
    return _STACKED_SPECS


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting of one public factory."""

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kind: Kind
    kwargs: Mapping[str, Any]
    tree: str
    core: bool
    """Whether this is the entry that stands for its factory in the dearer tests."""

    def make(self, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation, with some arguments replaced."""
        return self.factory(**{**self.kwargs, **overrides})

    def precise(self, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        """Like `make`, with Newton-Schulz in float32, for comparisons of two runs."""
        if self.accepts("ns_dtype"):
            overrides = {"ns_dtype": "float32", **overrides}
        return self.make(**overrides)

    def shared(self) -> optax.GradientTransformationExtraArgs:
        """What `precise` builds, one object for all tests, so that it compiles once."""
        return _shared(self.name)

    def accepts(self, argument: str) -> bool:
        """Whether the factory has an argument of this name."""
        return argument in inspect.signature(self.factory).parameters

    def params(self, dtype: str = "float32") -> Any:
        """The parameter tree this entry is run on."""
        return _build(_SHAPES[self.tree], dtype, np.random.default_rng(0))

    def grads(self, step: int = 0, dtype: str = "float32", scale: float = 1.0) -> Any:
        """A gradient of the parameters' structure, different at every step."""
        rng = np.random.default_rng(1000 + step)
        tree = _build(_SHAPES[self.tree], "float32", rng)
        return optax.tree.cast(optax.tree.scale(scale, tree), dtype)

    def corrects(self) -> bool:
        """Whether the state keeps a previous gradient."""
        if "inner" in self.kwargs:
            return True
        kept = self.kwargs.get("keep_prev_grad", True)
        return kept and self.accepts("correction") and "correction" not in self.kwargs

    def evaluates(self) -> bool:
        """Whether it evaluates gradients at the previous parameters."""
        return hasattr(self.factory, "evaluates")


def _lr_schedule(count: Any) -> Any:
    return 0.1 / (1.0 + count)


def _gamma_schedule(count: Any) -> Any:
    return 0.02 + 0.01 * count


def _grad_fn(params: Any) -> Any:
    return jax.tree.map(lambda p: 0.3 * p + 0.1, params)


def _with_grad_fn(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory whose transformations evaluate `_grad_fn` where they need gradients."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = factory(*args, **kwargs)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            return tx.update(updates, state, params, **{"grad_fn": _grad_fn, **extra})

        return optax.GradientTransformationExtraArgs(tx.init, update)

    build.evaluates = True
    return build


def _entries() -> Iterator[Entry]:
    def enrol(
        factory: Callable[..., Any], kind: Kind, tree: str, setting: str = "", **kwargs: Any
    ) -> Entry:
        name = factory.__name__ + (f"_{setting}" if setting else "")
        if kind == "optimizer":
            kwargs = {"learning_rate": 0.1, **kwargs}
        return Entry(name, factory, kind, kwargs, tree, core=not setting)

    mars, lion = mars_optax.mars, mars_optax.mars_lion
    shampoo, muon = mars_optax.mars_shampoo, mars_optax.mars_m
    schedules = {
        "learning_rate": _lr_schedule,
        "learning_rate_1d": _lr_schedule,
        "gamma": _gamma_schedule,
    }
    bfloat16_state = {"mu_dtype": "bfloat16", "prev_grad_dtype": "bfloat16"}

    yield enrol(mars, "optimizer", "mixed")
    yield enrol(mars, "optimizer", "mixed", "optimize_1d", optimize_1d=True, weight_decay=0.1)
    yield enrol(mars, "optimizer", "mixed", "amsgrad", amsgrad=True)
    yield enrol(mars, "optimizer", "mixed", "first_step", first_step="no_correction")
    yield enrol(mars, "optimizer", "mixed", "second_moment", second_moment="gradient")
    yield enrol(
        mars, "optimizer", "mixed", "adamw", correction="none", max_norm=None, optimize_1d=True
    )
    yield enrol(mars, "optimizer", "mixed", "bf16", nu_dtype="bfloat16", **bfloat16_state)
    yield enrol(mars, "optimizer", "mixed", "schedules", **schedules)
    yield enrol(mars, "optimizer", "stacked", "specs", weight_dimension_numbers=_STACKED_SPECS)

    exact_mars, storm_adamw = _with_grad_fn(mars), _with_grad_fn(mars_optax.storm_adamw)
    yield enrol(exact_mars, "optimizer", "mixed", "exact", correction="exact")
    yield enrol(exact_mars, "optimizer", "mixed", "svrg", correction="svrg", alpha=0.5)
    adaptive = mars_optax.AdaptiveGamma()
    yield enrol(mars, "optimizer", "mixed", "adaptive", gamma=adaptive)
    yield enrol(mars, "optimizer", "mixed", "float8", prev_grad_dtype="float8_e4m3fn")
    yield enrol(storm_adamw, "optimizer", "mixed")

    yield enrol(lion, "optimizer", "mixed")
    yield enrol(lion, "optimizer", "mixed", "optimize_1d", optimize_1d=True)
    yield enrol(lion, "optimizer", "mixed", "bf16", **bfloat16_state)
    yield enrol(
        lion, "optimizer", "mixed", "without_prev_grad", keep_prev_grad=False, max_norm=None
    )

    yield enrol(shampoo, "optimizer", "mixed")
    yield enrol(shampoo, "optimizer", "mixed", "optimize_1d", optimize_1d=True, amsgrad=True)
    yield enrol(shampoo, "optimizer", "mixed", "schedules", **schedules)
    yield enrol(shampoo, "optimizer", "stacked", "specs", weight_dimension_numbers=_STACKED_SPECS)

    yield enrol(muon, "optimizer", "mixed")
    yield enrol(muon, "optimizer", "mixed", "bf16", **bfloat16_state)
    yield enrol(
        muon,
        "optimizer",
        "mixed",
        "options",
        ns_coeffs="polar_express",
        max_norm=None,
        weight_decay_1d=0.3,
        learning_rate_1d=0.05,
        eps_1d=1e-6,
    )
    yield enrol(muon, "optimizer", "stacked", "specs", weight_dimension_numbers=_stacked_specs)
    exact_muon = _with_grad_fn(muon)
    yield enrol(exact_muon, "optimizer", "mixed", "sarah", correction="sarah")
    yield enrol(exact_muon, "optimizer", "mixed", "adaptive", correction="exact", gamma=adaptive)

    scale_by_mars = mars_optax.scale_by_mars
    yield enrol(scale_by_mars, "direction", "mixed")
    yield enrol(scale_by_mars, "direction", "mixed", "amsgrad", amsgrad=True, max_norm=None)
    yield enrol(scale_by_mars, "direction", "mixed", "bf16", nu_dtype="bfloat16", **bfloat16_state)
    yield enrol(mars_optax.scale_by_mars_lion, "direction", "mixed")
    yield enrol(mars_optax.scale_by_mars_shampoo, "direction", "matrices")
    yield enrol(
        mars_optax.scale_by_mars_shampoo,
        "direction",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
    )
    yield enrol(mars_optax.scale_by_mars_m, "direction", "matrices")
    yield enrol(
        mars_optax.scale_by_mars_m,
        "direction",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
        first_step="no_correction",
    )

    inner = scale_by_mars()
    yield enrol(mars_optax.cautious, "direction", "mixed", inner=inner)
    inner = mars_optax.correct_gradients()
    yield enrol(mars_optax.ignore_absent_gradients, "link", "mixed", inner=inner)

    correct = _with_grad_fn(mars_optax.correct_gradients)
    yield enrol(correct, "link", "mixed", "exact", correction="exact")
    yield enrol(correct, "link", "mixed", "storm", correction="storm")
    yield enrol(mars_optax.correct_gradients, "link", "mixed")
    yield enrol(mars_optax.correct_gradients, "link", "mixed", "clip", correction_clip=0.5)
    yield enrol(mars_optax.clip_by_leaf_norm, "link", "mixed")
    yield enrol(
        mars_optax.clip_by_leaf_norm,
        "link",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
    )


ENTRIES: tuple[Entry, ...] = tuple(_entries())


@functools.cache
def _shared(name: str) -> optax.GradientTransformationExtraArgs:
    return get(name).precise()


def select(
    *kinds: Kind, core: bool = False, where: Callable[[Entry], bool] = lambda _: True
) -> tuple[tuple[str, Entry], ...]:
    """Entries as named parameters for `absl.testing.parameterized`."""
    chosen = tuple(
        (f"_{entry.name}", entry)
        for entry in ENTRIES
        if (not kinds or entry.kind in kinds) and (entry.core or not core) and where(entry)
    )
    if not chosen:
        raise AssertionError("no entry of the registry fits")
    return chosen


def get(name: str) -> Entry:
    """The entry of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)
