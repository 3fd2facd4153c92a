"""What the commands that time steps have in common: flags, and what they do with rows."""

import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging

from benchmarks import gpt2_shapes

MODELS = flags.DEFINE_list(
    "models",
    None,
    f"Whose parameters, out of {', '.join(gpt2_shapes.MODELS)}; 'tiny' on a processor, else "
    "'small'.",
)
ROWS = flags.DEFINE_string(
    "rows",
    None,
    "Regular expression that the names of the optimizers match as a whole. The ratios need 'adamw' "
    "and, where PyTorch is, 'torch_adamw_fused'. By default all; with --train_step adamw, mars, "
    "mars_m and muon.",
)
REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements of each row.", lower_bound=1)
INNER = flags.DEFINE_integer(
    "inner",
    None,
    "Steps in a measurement; by default fewer for larger models. With --train_step 4.",
    lower_bound=2,
)
RESULT = flags.DEFINE_string(
    "result", None, "JSON file to write; benchmarks/results/COMMAND_DEVICE.json by default."
)
COMMIT = flags.DEFINE_string("commit", None, "What to record as the commit; by default git says.")


def subset(name: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns the values of a flag.

    Args:
      name: the flag's.
      given: its values.
      known: those that there are.

    Returns:
      `given`.

    Raises:
      ValueError: If there is none, or an unknown one.
    """
    unknown = sorted(set(given) - set(known))
    if unknown or not given:
        raise ValueError(f"Expected --{name} out of {', '.join(known)}, got {list(given)}.")
    return list(given)


def pattern(text: str) -> re.Pattern[str]:
    """Compiles the value of --rows, or raises a `ValueError` that names the flag."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression as --rows, got {text!r}: {error}."
        ) from error


def guarded(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds the figures to a row, or the "error" that came instead.

    Args:
      row: what is known before.
      measure: returns the figures.

    Returns:
      A new row.
    """
    try:
        return {**row, **measure()}
    # Out of memory comes as a RuntimeError, a refusal as a NotImplementedError; whatever happens
    # to one row, the others should be measured.
    except Exception as error:
        message = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {message[0] if message else 'without a message'}"
        logging.info("%s failed: %s", row["name"], reason)
        return {**row, "error": reason}


def result_path(kind: str, device: str) -> pathlib.Path:
    """Returns the JSON file to write, --result where it is given.

    Args:
      kind: what the file's name begins with.
      device: the device's name, which follows.
    """
    if RESULT.value is not None:
        return pathlib.Path(RESULT.value)
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return pathlib.Path(__file__).parent / "results" / f"{kind}_{slug}.json"
