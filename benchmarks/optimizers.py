"""The optimizers that are compared, each with the settings it is compared at."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
import optax.contrib

import mars_optax

Settings = Mapping[str, Any]
Build = Callable[[optax.Schedule, dict[str, Any]], optax.GradientTransformation]

# As in the training scripts of Muon and MARS-M, only the blocks' kernels are orthogonalized. A row
# of an embedding or a column of the output layer is one symbol's vector: they get the AdamW rule.
_MATRICES = mars_optax.dimension_numbers_by_path(
    [("blocks/.*/kernel", optax.contrib.MuonDimensionNumbers())], default="vector"
)

_CLIP = optax.clip_by_global_norm(1.0)
_DECAY = 0.1
_VECTORS = {"learning_rate_1d": 0.5, "b1_1d": 0.9, "b2_1d": 0.95, "weight_decay_1d": _DECAY}
_MARS = {
    "gamma": 0.025,
    "max_norm": 1.0,
    "correction": "approx",
    "first_step": "zeros",
    "keep_prev_grad": True,
    "prev_grad_dtype": None,
    "mu_dtype": None,
    "weight_decay": _DECAY,
    **_VECTORS,
}


def _optax(factory: Callable[..., optax.GradientTransformation]) -> Build:
    return lambda schedule, settings: factory(schedule, **settings)


def _mars_optax(factory: Callable[..., optax.GradientTransformation], **fixed: Any) -> Build:
    def build(schedule: optax.Schedule, settings: dict[str, Any]) -> optax.GradientTransformation:
        factor = settings.pop("learning_rate_1d")
        return factory(
            schedule,
            learning_rate_1d=lambda count: factor * schedule(count),
            **fixed,
            **settings,
        )

    return build


def _muon(
    learning_rate: optax.Schedule,
    *,
    learning_rate_1d: optax.Schedule,
    b1_1d: float,
    b2_1d: float,
    weight_decay_1d: float,
    **settings: Any,
) -> optax.GradientTransformation:
    """Optax's Muon with the argument names of mars_optax."""
    return optax.contrib.muon(
        learning_rate,
        adam_learning_rate=learning_rate_1d,
        adam_b1=b1_1d,
        adam_b2=b2_1d,
        adam_weight_decay=weight_decay_1d,
        muon_weight_dimension_numbers=_MATRICES,
        **settings,
    )


def _corrected(factory: Build) -> Build:
    """Puts the correction and the clip of each matrix in front of an optimizer."""

    def build(schedule: optax.Schedule, settings: dict[str, Any]) -> optax.GradientTransformation:
        gamma, b1, max_norm = (settings.pop(name) for name in ("gamma", "b1", "max_norm"))
        return optax.chain(
            mars_optax.correct_gradients(gamma, b1),
            mars_optax.clip_by_leaf_norm(max_norm),
            factory(schedule, settings),
        )

    return build


# float32, as Optax's Muon computes: bfloat16 gains nothing on most CPUs.
_ORTHOGONAL = {"weight_dimension_numbers": _MATRICES, "ns_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer at fixed settings, waiting for its learning rate.

    Attributes:
      name: how the user asked for it, and what the report calls it.
      learning_rate: peak learning rate where no grid is given.
      settings: everything else that is a number. `learning_rate_1d` is a factor: leaves under the
        vector rule get this multiple of the learning rate.
      build: makes the Optax transformation from a schedule and the settings.
    """

    name: str
    learning_rate: float
    settings: Settings
    build: Build

    def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Builds the transformation behind the global clip that every optimizer gets."""
        return optax.chain(_CLIP, self.build(schedule, dict(self.settings)))


def clip(grads: optax.Updates) -> optax.Updates:
    """Clips gradients as every optimizer's are: exact mode's, too, are handed over clipped."""
    return _CLIP.update(grads, optax.EmptyState())[0]


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            "adamw", 8e-3, {"b1": 0.9, "b2": 0.95, "weight_decay": _DECAY}, _optax(optax.adamw)
        ),
        # At AdamW's betas, the correction and the clip of each matrix are what differs from AdamW.
        # The published betas, 0.95 and 0.99, average over a window too long for a thousand steps.
        Optimizer(
            "mars",
            1.6e-2,
            {"b1": 0.9, "b2": 0.95, "second_moment": "corrected", **_MARS},
            _mars_optax(mars_optax.mars),
        ),
        Optimizer(
            "lion", 5e-4, {"b1": 0.9, "b2": 0.99, "weight_decay": _DECAY}, _optax(optax.lion)
        ),
        Optimizer("mars_lion", 5e-4, {"b1": 0.95, **_MARS}, _mars_optax(mars_optax.mars_lion)),
        Optimizer(
            "muon",
            8e-3,
            {"beta": 0.95, "consistent_rms": 0.2, "weight_decay": _DECAY, **_VECTORS},
            _mars_optax(_muon),
        ),
        Optimizer(
            "mars_m", 1.6e-2, {"b1": 0.95, **_MARS}, _mars_optax(mars_optax.mars_m, **_ORTHOGONAL)
        ),
        Optimizer(
            "corrected_muon",
            1.6e-2,
            {
                "gamma": 0.025,
                "b1": 0.95,
                "max_norm": 1.0,
                "beta": 0.95,
                "consistent_rms": 0.2,
                "weight_decay": _DECAY,
                **_VECTORS,
            },
            _corrected(_mars_optax(_muon)),
        ),
        Optimizer(
            "storm_adamw",
            8e-3,
            {"gamma": 0.1, "b1": 0.9, "b2": 0.95, "correction_clip": None, "weight_decay": _DECAY},
            _optax(mars_optax.storm_adamw),
        ),
        Optimizer(
            "mars_shampoo",
            8e-3,
            {"b1": 0.95, **_MARS},
            _mars_optax(mars_optax.mars_shampoo, **_ORTHOGONAL),
        ),
    )
}


def _value(text: str, default: Any, *, meaning: str) -> Any:
    """Reads a setting: 'none', or a value of the default's kind (a word where that is None)."""
    if text == "none":
        return None
    if isinstance(default, bool) and text in ("true", "false"):
        return text == "true"
    if isinstance(default, str) or default is None:
        return text
    try:
        return float(text)
    except ValueError:
        kind = "'true' or 'false'" if isinstance(default, bool) else "a number or 'none'"
        raise ValueError(
            f"Expected {kind} for {meaning}, got {text!r}. Write it like 'mars:gamma=0.05'."
        ) from None


def parse_optimizer(text: str) -> Optimizer:
    """Reads an optimizer's name, with settings that differ from its defaults behind colons.

    Args:
      text: for example `adamw`, or `adamw:b1=0.95:b2=0.99`.

    Returns:
      The optimizer, named `text`.

    Raises:
      ValueError: unknown optimizer or setting, or a value that is no number.
    """
    name, *overrides = text.split(":")
    if name not in OPTIMIZERS:
        raise ValueError(
            f"Expected an optimizer out of {', '.join(OPTIMIZERS)}, got {name!r}. Correct "
            "--optimizers."
        )
    optimizer = OPTIMIZERS[name]
    settings = dict(optimizer.settings)
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in settings:
            raise ValueError(
                f"Expected a setting of {name} out of {', '.join(settings)}, got {key!r} in "
                f"{text!r}. Learning rates go to --learning_rates."
            )
        settings[key] = _value(value, settings[key], meaning=f"{key} in {text!r}")
    return dataclasses.replace(optimizer, name=text, settings=settings)


def parse_optimizers(texts: Sequence[str]) -> list[Optimizer]:
    """Reads several optimizers, see `parse_optimizer`; one named twice is a `ValueError`."""
    if not texts or len(set(texts)) < len(texts):
        raise ValueError(
            f"Expected at least one optimizer, each named once, got {list(texts)}. Correct "
            "--optimizers."
        )
    return [parse_optimizer(text) for text in texts]


def parse_learning_rates(texts: Sequence[str]) -> list[float]:
    """Reads a grid of learning rates.

    Args:
      texts: positive numbers.

    Returns:
      The numbers in rising order.

    Raises:
      ValueError: something is no finite positive number, or is there twice.
    """
    rates = []
    for text in texts:
        try:
            rate = float(text)
        except ValueError:
            rate = float("nan")
        if not 0 < rate < float("inf"):
            raise ValueError(
                f"Expected positive learning rates separated by commas, got {text!r}. Write them "
                "like --learning_rates=1e-3,2e-3,4e-3."
            )
        rates.append(rate)
    if len(set(rates)) < len(rates):
        raise ValueError(
            f"Expected learning rates that differ, got {rates}. Correct --learning_rates."
        )
    return sorted(rates)
