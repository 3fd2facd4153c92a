"""The optimizers whose step is timed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optax
import optax.contrib

import mars_optax
from benchmarks import gpt2_shapes
from benchmarks.steps.step_loop import Step

_LEARNING_RATE = 1e-4
_DECAY = 0.1
IMPLEMENTATIONS = ("default", "xla", "pallas")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An optimizer and the way in which its step is called.

    Attributes:
      name: what the report calls it: the optimizer's name, then "/xla" or "/pallas" where the
        implementation was chosen, then "/fused" where `mars_optax.fused_step` is called.
      build: makes the transformation for a tree of parameters.
      clipped: whether leaves with a previous gradient are clipped.
      orthogonalizes: whether kernels go through Newton-Schulz.
      fused: whether `mars_optax.fused_step` is called instead of `update` and
        `optax.apply_updates`.
    """

    name: str
    build: Callable[[Any], optax.GradientTransformation]
    clipped: bool = False
    orthogonalizes: bool = False
    fused: bool = False

    def step(self, transformation: optax.GradientTransformation) -> Step:
        """Returns the step of a transformation that `build` made."""
        if self.fused:
            fused_step = mars_optax.fused_step  # type: ignore[attr-defined, unused-ignore]
            return lambda grads, state, params: fused_step(transformation, grads, state, params)

        def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step


def _muon(params: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(
        _LEARNING_RATE,
        weight_decay=_DECAY,
        muon_weight_dimension_numbers=gpt2_shapes.dimension_numbers(params, embeddings=False),
    )


_PEERS = (
    Candidate("adamw", lambda params: optax.adamw(_LEARNING_RATE, weight_decay=_DECAY)),
    Candidate("lion", lambda params: optax.lion(_LEARNING_RATE, weight_decay=_DECAY)),
    Candidate("muon", _muon, orthogonalizes=True),
)


@dataclasses.dataclass(frozen=True)
class _Ours:
    """One of this package's optimizers at settings of its own."""

    factory: Callable[..., optax.GradientTransformation]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    orthogonalizes: bool = False
    embeddings: bool = False  # whether they are matrices, too

    def build(self, params: Any, *, implementation: str) -> optax.GradientTransformation:
        has_kernels = "implementation" in inspect.signature(self.factory).parameters
        chosen = {"implementation": None if implementation == "default" else implementation}
        return self.factory(
            _LEARNING_RATE,
            weight_decay=_DECAY,
            weight_dimension_numbers=gpt2_shapes.dimension_numbers(
                params, embeddings=self.embeddings
            ),
            **(chosen if has_kernels else {}),
            **self.settings,
        )


_OURS = {
    "mars": _Ours(mars_optax.mars, embeddings=True),
    "mars_no_clip": _Ours(mars_optax.mars, {"max_norm": None}, embeddings=True),
    "mars_bf16_prev_grad": _Ours(mars_optax.mars, {"prev_grad_dtype": "bfloat16"}, embeddings=True),
    "mars_memory_free": _Ours(
        mars_optax.mars,
        {"max_norm": None, "keep_prev_grad": False, "second_moment": "gradient"},
        embeddings=True,
    ),
    "mars_lion": _Ours(mars_optax.mars_lion, embeddings=True),
    "mars_shampoo": _Ours(mars_optax.mars_shampoo, orthogonalizes=True),
    "mars_m": _Ours(mars_optax.mars_m, orthogonalizes=True),
    "mars_m_rows": _Ours(mars_optax.mars_m, {"row_b2": 0.95}, orthogonalizes=True),
    "mars_soap": _Ours(mars_optax.mars_soap),
}


def candidates(implementations: Sequence[str] = ("default",)) -> list[Candidate]:
    """Lists what is timed, Optax's optimizers first.

    Args:
      implementations: out of `IMPLEMENTATIONS`; ours are timed with each.

    Returns:
      The candidates. Where this version has `mars_optax.fused_step`, each of ours is there with it
      too, and so is `optax.adamw`.
    """
    ours = [
        Candidate(
            name if implementation == "default" else f"{name}/{implementation}",
            functools.partial(optimizer.build, implementation=implementation),
            clipped=optimizer.settings.get("max_norm", 1.0) is not None,
            orthogonalizes=optimizer.orthogonalizes,
        )
        for name, optimizer in _OURS.items()
        for implementation in implementations
    ]
    listed = [*_PEERS, *ours]
    if hasattr(mars_optax, "fused_step"):
        fused = [_PEERS[0], *ours]
        listed += [dataclasses.replace(one, name=f"{one.name}/fused", fused=True) for one in fused]
    return listed
