"""The optimizers that are compared, each with the settings it is compared at."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import mars_optax

# The least and the largest learning rate: far from what float32 rounds to zero or to infinity.
LEARNING_RATES = (1e-30, 1e30)
# A gamma that follows from the gradients, as the setting `gamma`.
ADAPTIVE = "adaptive"
Settings = Mapping[str, Any]
# Which leaves are matrices: what `weight_dimension_numbers` takes.
Matrices = Callable[[Any], Any]
Build = Callable[[optax.Schedule, dict[str, Any], Matrices], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Domain:
    """What a kind of model asks of the optimizers.

    Attributes:
      matrices: what the setting `matrices` may be, and which leaves are matrices then; the others
        get the AdamW rule. `all` are all of rank 2 or more, `hidden` those between two hidden
        layers.
      learning_rates: peak learning rates other than those of `OPTIMIZERS`.
      settings: values other than those of `OPTIMIZERS`, for every optimizer that has them.
      settings_of: the same, for one optimizer.
    """

    matrices: Mapping[str, Matrices]
    learning_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    settings: Settings = dataclasses.field(default_factory=dict)
    settings_of: Mapping[str, Settings] = dataclasses.field(default_factory=dict)


# As in the training scripts of Muon and MARS-M, only the blocks' kernels are orthogonalized. A row
# of an embedding or a column of the output layer is one symbol's vector: they get the AdamW rule.
LANGUAGE = Domain(
    {
        "all": mars_optax.dimension_numbers_by_path([], default="rank2"),
        "hidden": mars_optax.dimension_numbers_by_path(
            [("blocks/.*/kernel", optax.contrib.MuonDimensionNumbers())], default="vector"
        ),
    }
)

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
    "matrices": "all",
    **_VECTORS,
}


def _optax(factory: Callable[..., optax.GradientTransformation]) -> Build:
    def build(
        schedule: optax.Schedule, settings: dict[str, Any], matrices: Matrices
    ) -> optax.GradientTransformation:
        return factory(schedule, **settings)

    return build


def _mars_optax(factory: Callable[..., optax.GradientTransformation]) -> Build:
    def build(
        schedule: optax.Schedule, settings: dict[str, Any], matrices: Matrices
    ) -> optax.GradientTransformation:
        factor = settings.pop("learning_rate_1d")
        return factory(
            schedule,
            learning_rate_1d=lambda count: factor * schedule(count),
            weight_dimension_numbers=matrices,
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
    weight_dimension_numbers: Matrices,
    **settings: Any,
) -> optax.GradientTransformation:
    """Optax's Muon with the argument names of mars_optax."""
    return optax.contrib.muon(
        learning_rate,
        adam_learning_rate=learning_rate_1d,
        adam_b1=b1_1d,
        adam_b2=b2_1d,
        adam_weight_decay=weight_decay_1d,
        muon_weight_dimension_numbers=weight_dimension_numbers,
        **settings,
    )


def _corrected(factory: Build) -> Build:
    """Puts the correction and the clip of each leaf, vectors too, in front of an optimizer."""

    def build(
        schedule: optax.Schedule, settings: dict[str, Any], matrices: Matrices
    ) -> optax.GradientTransformation:
        gamma, b1, max_norm = (settings.pop(name) for name in ("gamma", "b1", "max_norm"))
        return optax.chain(
            mars_optax.correct_gradients(gamma, b1),
            mars_optax.clip_by_leaf_norm(max_norm),
            factory(schedule, settings, matrices),
        )

    return build


# float32, as Optax's Muon computes: bfloat16 gains nothing on most CPUs.
_ORTHOGONAL = {"matrices": "hidden", "ns_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer at fixed settings, waiting for its learning rate.

    Attributes:
      name: how the user asked for it, and what the report calls it.
      learning_rate: peak learning rate where no grid is given.
      settings: everything else. `learning_rate_1d` is a factor: leaves under the vector rule get
        this multiple of the learning rate. `global_clip` is the bound on the norm of all gradients
        together, in front of everything. `matrices` is a name out of its domain's.
      build: makes the Optax transformation from a schedule, the settings and the matrices.
      domain: the kind of model.
    """

    name: str
    learning_rate: float
    settings: Settings
    build: Build
    domain: Domain = LANGUAGE

    @property
    def base(self) -> str:
        """Which of `OPTIMIZERS` it is."""
        return self.name.partition(":")[0]

    def every_setting(self) -> dict[str, Any]:
        """Returns the settings, and the defaults of those that are not among them."""
        found: dict[str, Any] = {}
        for factory in _FACTORIES[self.base]:
            for name, parameter in inspect.signature(factory).parameters.items():
                value = parameter.default
                # Which leaves are matrices is the setting `matrices`.
                if value is parameter.empty or name.endswith("weight_dimension_numbers"):
                    continue
                plain = isinstance(value, (str, int, float, tuple, type(None)))
                found[_NAMES.get(name, name)] = value if plain else str(value)
        return {**found, **self.settings}

    def arguments(self) -> dict[str, Any]:
        """Returns the settings as functions take them."""
        gamma = self.settings.get("gamma")
        rule = {"gamma": mars_optax.AdaptiveGamma()} if gamma == ADAPTIVE else {}
        return {**self.settings, **rule}

    def _clip(self) -> optax.GradientTransformation:
        bound = self.settings["global_clip"]
        return optax.identity() if bound is None else optax.clip_by_global_norm(bound)

    def transformation(self, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation behind the global clip."""
        settings = self.arguments()
        del settings["global_clip"]
        matrices = self.domain.matrices[settings.pop("matrices", "all")]
        return optax.chain(self._clip(), self.build(schedule, settings, matrices))

    def clip(self, grads: Any) -> Any:
        """Clips gradients as the transformation does: exact mode's, too, are clipped."""
        return self._clip().update(grads, optax.EmptyState())[0]

    def step(
        self,
        schedule: optax.Schedule,
        gradient: Callable[[Any], Any],
        grads: Any,
        state: Any,
        params: Any,
    ) -> tuple[Any, Any]:
        """Makes one update.

        Args:
          schedule: the learning rate.
          gradient: maps parameters to the gradients of this step's batch at them, for whoever asks.
          grads: the gradients at `params`.
          state: the state of `transformation(schedule)`.
          params: the parameters.

        Returns:
          New parameters and new state.
        """
        updates, state = self.transformation(schedule).update(
            grads, state, params, grad_fn=lambda params: self.clip(gradient(params))
        )
        return optax.apply_updates(params, updates), state


OPTIMIZERS = {
    optimizer.name: dataclasses.replace(
        optimizer, settings={**optimizer.settings, "global_clip": 1.0}
    )
    for optimizer in (
        Optimizer(
            "adamw", 8e-3, {"b1": 0.9, "b2": 0.95, "weight_decay": _DECAY}, _optax(optax.adamw)
        ),
        # Nesterov's momentum, which the correction of `mars` is at gamma = 1 - b1.
        Optimizer(
            "nadamw", 8e-3, {"b1": 0.9, "b2": 0.95, "weight_decay": _DECAY}, _optax(optax.nadamw)
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
            {
                "beta": 0.95,
                "consistent_rms": 0.2,
                "weight_decay": _DECAY,
                "matrices": "hidden",
                **_VECTORS,
            },
            _mars_optax(_muon),
        ),
        Optimizer(
            "mars_m", 1.6e-2, {"b1": 0.95, **_MARS, **_ORTHOGONAL}, _mars_optax(mars_optax.mars_m)
        ),
        Optimizer(
            "mars_m_rows",
            1.6e-2,
            {"b1": 0.95, "row_b2": 0.95, **_MARS, **_ORTHOGONAL},
            _mars_optax(mars_optax.mars_m),
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
                "matrices": "hidden",
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
            {"b1": 0.95, **_MARS, **_ORTHOGONAL},
            _mars_optax(mars_optax.mars_shampoo),
        ),
        Optimizer(
            "mars_soap",
            8e-3,
            {
                "b1": 0.95,
                "b2": 0.95,
                "precondition_frequency": 10,
                "one_sided": False,
                **{key: value for key, value in _MARS.items() if key != "keep_prev_grad"},
                "matrices": "hidden",
            },
            _mars_optax(mars_optax.mars_soap),
        ),
    )
}


# Whose defaults hold where an optimizer says nothing else; of Muon, as `_muon` names them.
_FACTORIES: Mapping[str, Sequence[Callable[..., Any]]] = {
    "adamw": (optax.adamw,),
    "nadamw": (optax.nadamw,),
    "mars": (mars_optax.mars,),
    "lion": (optax.lion,),
    "mars_lion": (mars_optax.mars_lion,),
    "muon": (optax.contrib.muon,),
    "mars_m": (mars_optax.mars_m,),
    "mars_m_rows": (mars_optax.mars_m,),
    "corrected_muon": (
        optax.contrib.muon,
        mars_optax.correct_gradients,
        mars_optax.clip_by_leaf_norm,
    ),
    "storm_adamw": (mars_optax.storm_adamw,),
    "mars_shampoo": (mars_optax.mars_shampoo,),
    "mars_soap": (mars_optax.mars_soap,),
}
_NAMES = {
    "adam_learning_rate": "learning_rate_1d",
    "adam_b1": "b1_1d",
    "adam_b2": "b2_1d",
    "adam_weight_decay": "weight_decay_1d",
}

# Optax checks none of its optimizers' settings: smallest, largest, whether that is excluded.
_RANGES = {
    **dict.fromkeys(("b1", "b2", "b1_1d", "b2_1d", "beta"), (0.0, 1.0, True)),
    **dict.fromkeys(("weight_decay", "weight_decay_1d", "learning_rate_1d"), (0.0, 1e6, False)),
    "consistent_rms": (0.0, 1e6, False),
}

# The rows of an ablation: what follows the name of the optimizer. The first is the control.
_MEMORY_FREE = ("max_norm=none", "keep_prev_grad=false")
ABLATIONS: Mapping[str, Sequence[Sequence[str]]] = {
    "gamma": [[f"gamma={gamma}"] for gamma in ("0", "0.01", "0.025", "0.05", "0.1", "0.2")],
    "clip": [
        [],
        ["max_norm=none"],
        ["global_clip=none"],
        ["max_norm=none", "global_clip=none"],
    ],
    "first_step": [[], ["first_step=no_correction"]],
    "second_moment": [[], ["second_moment=gradient"]],
    "correction": [["gamma=0"], [], ["correction=exact"]],
    "previous_gradient": [
        [],
        ["prev_grad_dtype=bfloat16"],
        ["prev_grad_dtype=float8_e4m3fn"],
        list(_MEMORY_FREE),
    ],
    "betas": [[], ["b2=0.99"], ["b1=0.95", "b2=0.99"]],
    "iterations": [
        [f"ns_coeffs={preset}", f"ns_steps={steps}"]
        for preset in ("quintic", "polar_express")
        for steps in (3, 4, 5)
    ],
    "matrices": [["matrices=hidden"], ["matrices=all"]],
    "convolutions": [["matrices=dense"], ["matrices=hidden"], ["matrices=all"]],
}
TABLES: Mapping[str, Sequence[str]] = {
    "main": ("adamw", "lion", "muon", "mars", "mars_lion", "mars_shampoo", "mars_m"),
    # Longer averages of squares, wherever there are some; and other momenta.
    "averages": (
        "adamw:b2=0.999",
        "adamw:b2=0.99",
        "nadamw:b2=0.999",
        "nadamw:b2=0.99",
        "nadamw:b1=0.95:b2=0.99",
        "mars:gamma=0:b2=0.99",
        "mars:b2=0.99",
        "mars:gamma=0.1:b2=0.99",
        "mars:gamma=0.1:b2=0.999",
        "mars:b1=0.95:gamma=0.1:b2=0.99",
        "muon:b2_1d=0.99",
        "muon:beta=0.9:b2_1d=0.99",
        "mars_m:b2_1d=0.99",
        "mars_m:gamma=0.1:b2_1d=0.99",
        "mars_m:b1=0.9:gamma=0.2:b2_1d=0.99",
    ),
    "momenta": (
        "muon",
        "muon:beta=0.9",
        "mars_m",
        "mars_m:gamma=0.1",
        "mars_m:gamma=0.2",
        "mars_m:b1=0.9:gamma=0.2",
    ),
    # What it is that gains in `mars` at its published betas.
    "parts": (
        "mars:b1=0.95:gamma=0.1:b2=0.99",
        "nadamw:b1=0.95:b2=0.99",
        "mars:b1=0.95:gamma=0:b2=0.99",
        "mars:b1=0.95:gamma=0.1:b2=0.99:max_norm=none",
        "mars:b1=0.95:gamma=0.1:b2=0.99:second_moment=gradient",
    ),
}


def table(name: str) -> list[str]:
    """Returns the rows of a named table.

    Args:
      name: one of `TABLES`, of which `main` is every optimizer at its own settings; or an optimizer
        and one of `ABLATIONS`, such as `mars/gamma`.

    Returns:
      Optimizers as `parse_optimizer` reads them.

    Raises:
      ValueError: If there is no such table, or it is of settings that the optimizer lacks.
    """
    if name in TABLES:
        return list(TABLES[name])
    base, _, ablation = name.partition("/")
    if base not in OPTIMIZERS or ablation not in ABLATIONS:
        raise ValueError(
            f"Expected one of {', '.join(TABLES)}, or OPTIMIZER/TABLE with one of "
            f"{', '.join(OPTIMIZERS)} and one of {', '.join(ABLATIONS)}, as --table, got {name!r}. "
            "Write it like --table=mars/gamma."
        )
    varied = {text.partition("=")[0] for row in ABLATIONS[ablation] for text in row}
    settings = OPTIMIZERS[base].every_setting()
    if not varied <= set(settings):
        raise ValueError(
            f"Expected a table of settings that {base} has, {', '.join(settings)}, as --table, got "
            f"{name!r}, which varies {', '.join(sorted(varied))}. Choose another."
        )
    rows = []
    for overrides in ABLATIONS[ablation]:
        # Without the previous gradient the second moment cannot be that of the corrected one.
        moment = tuple(overrides) == _MEMORY_FREE and "second_moment" in settings
        rows.append(":".join([base, *overrides, *["second_moment=gradient"][: int(moment)]]))
    return rows


def _value(text: str, default: Any, *, meaning: str) -> Any:
    """Reads a setting: 'none', or a value of the default's kind.

    Where the default is None, a number, or else a word.
    """
    if text == "none":
        return None
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text in ("true", "false"):
            return text == "true"
        kind = "'true' or 'false'"
    else:
        try:
            number = float(text)
        except ValueError:
            if default is None:
                return text
            number = math.nan
        is_whole = isinstance(default, int)
        if number.is_integer() if is_whole else math.isfinite(number):
            return int(number) if is_whole else number
        kind = f"a {'whole' if is_whole else 'finite'} number or 'none'"
    raise ValueError(
        f"Expected {kind} for {meaning}, got {text!r}. Write it like 'mars:gamma=0.05' in "
        "--optimizers."
    )


def parse_optimizer(text: str, domain: Domain = LANGUAGE) -> Optimizer:
    """Reads an optimizer's name, with settings that differ from its defaults behind colons.

    Args:
      text: for example `adamw`, or `adamw:b1=0.95:b2=0.99`.
      domain: the kind of model, which may have other defaults.

    Returns:
      The optimizer, named `text`.

    Raises:
      ValueError: unknown optimizer or setting, or a value of the wrong kind.
    """
    name, *overrides = text.split(":")
    if name not in OPTIMIZERS:
        raise ValueError(
            f"Expected an optimizer out of {', '.join(OPTIMIZERS)}, got {name!r}. Correct "
            "--optimizers."
        )
    optimizer = OPTIMIZERS[name]
    settings = dict(optimizer.settings)
    settings |= {key: value for key, value in domain.settings.items() if key in settings}
    settings |= domain.settings_of.get(name, {})
    # Whatever else its factory takes can be set, too.
    defaults = {**optimizer.every_setting(), **settings}
    keys = [override.partition("=")[0] for override in overrides]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"Expected each setting once, got {text!r}. Leave one of them out of --optimizers."
        )
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in defaults:
            raise ValueError(
                f"Expected a setting of {name} out of {', '.join(defaults)}, got {key!r} in "
                f"{text!r}. Learning rates go to --learning_rates."
            )
        if (key, value) == ("gamma", ADAPTIVE):
            settings[key] = value
        else:
            settings[key] = _value(value, defaults[key], meaning=f"{key} in {text!r}")
    if settings.get("matrices", "all") not in domain.matrices:
        raise ValueError(
            f"Expected matrices out of {', '.join(domain.matrices)}, got {settings['matrices']!r} "
            f"in {text!r}. Write it like '{name}:matrices=all'."
        )
    for key, (low, high, open_end) in _RANGES.items():
        set_to = settings.get(key)
        if isinstance(set_to, (int, float)) and not (
            low <= set_to < high or (set_to == high and not open_end)
        ):
            raise ValueError(
                f"Expected {key} from {low:g} to {'below ' * open_end}{high:g} in {text!r}, got "
                f"{set_to:g}. Correct --optimizers."
            )
    bound = settings["global_clip"]
    if bound is not None and not (isinstance(bound, float) and bound > 0):
        raise ValueError(
            f"Expected a positive number or 'none' for global_clip in {text!r}, got {bound!r}. "
            "Correct --optimizers."
        )
    rate = domain.learning_rates.get(name, optimizer.learning_rate)
    return dataclasses.replace(
        optimizer, name=text, learning_rate=rate, settings=settings, domain=domain
    )


def _require_step(optimizer: Optimizer) -> None:
    """Raises a `ValueError` if an optimizer cannot make a step, of a matrix and a vector."""
    params = {"blocks": {"0": {"kernel": jnp.zeros((2, 2)), "scale": jnp.zeros(2)}}}
    schedule = optax.constant_schedule(1.0)

    def step(params: Any) -> Any:
        state = optimizer.transformation(schedule).init(params)
        return optimizer.step(schedule, lambda params: params, params, state, params)

    try:
        jax.eval_shape(step, params)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected settings that {optimizer.base} takes, got {optimizer.name!r}: {error} "
            "Correct --optimizers."
        ) from error


def parse_optimizers(texts: Sequence[str], domain: Domain = LANGUAGE) -> list[Optimizer]:
    """Reads several optimizers that are to run.

    Args:
      texts: see `parse_optimizer`.
      domain: the kind of model.

    Returns:
      The optimizers.

    Raises:
      ValueError: none is named or one is twice, one cannot be read, or not make a step.
    """
    if not texts or len(set(texts)) < len(texts):
        raise ValueError(
            f"Expected at least one optimizer, each named once, got {list(texts)}. Correct "
            "--optimizers."
        )
    optimizers = [parse_optimizer(text, domain) for text in texts]
    for optimizer in optimizers:
        _require_step(optimizer)
    return optimizers


def distinct(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], list[str]]:
    """Drops optimizers with the settings of one before, which would be compared with themselves.

    Args:
      optimizers: of one domain, some of whose defaults may be what a row of a table sets.

    Returns:
      Those that are left, and a sentence about each of the others.
    """
    kept: list[Optimizer] = []
    notes = []
    for optimizer in optimizers:
        same = (
            other.name
            for other in kept
            if other.base == optimizer.base and other.settings == optimizer.settings
        )
        first = next(same, None)
        if first is None:
            kept.append(optimizer)
        else:
            notes.append(f"`{optimizer.name}` is left out: its settings are those of `{first}`.")
    return kept, notes


def parse_seeds(texts: Sequence[str], flag: str) -> list[int]:
    """Reads seeds.

    Args:
      texts: 32-bit whole numbers from 0.
      flag: that they come from.

    Returns:
      The numbers.

    Raises:
      ValueError: something is no such number or is there twice, or there is none.
    """
    seeds = [int(text) for text in texts if text.isdecimal() and len(text) <= 10]
    if not texts or len(set(seeds)) < len(texts) or max(seeds) >= 2**32:
        raise ValueError(
            f"Expected different whole numbers below 2**32 separated by commas as --{flag}, got "
            f"{','.join(texts)[:99]!r}. Write them like --{flag}=0,1,2."
        )
    return seeds


def parse_learning_rates(texts: Sequence[str]) -> list[float]:
    """Reads a grid of learning rates.

    Args:
      texts: numbers out of `LEARNING_RATES`.

    Returns:
      The numbers in rising order.

    Raises:
      ValueError: something is no such number or is there twice, or there is none.
    """
    rates = []
    least, largest = LEARNING_RATES
    for text in texts or [""]:
        try:
            rate = float(text)
        except ValueError:
            rate = float("nan")
        if not least <= rate <= largest:
            raise ValueError(
                f"Expected learning rates from {least:g} to {largest:g} separated by commas, got "
                f"{text!r}. Write them like --learning_rates=1e-3,2e-3,4e-3."
            )
        rates.append(rate)
    if len(set(rates)) < len(rates):
        raise ValueError(
            f"Expected learning rates that differ, got {rates}. Correct --learning_rates."
        )
    return sorted(rates)
