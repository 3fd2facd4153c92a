"""Prints the table for humans: `python -m tests.differential.table [GROUP OR SITUATION ...]`.

A row for each situation, what it does, which optimizers of Optax pass, and which of ours do not,
with the reason or the error.
"""

import os
import sys
import warnings
from collections.abc import Sequence

import jax

from tests.differential import situation, subjects


def _row(row: situation.Situation) -> str:
    """A line of Markdown."""
    missing = row.missing()
    if missing:
        optax, ours = f"needs {missing}", ""
    else:
        failing = [s.name for s in subjects.OPTAX if row.outcome(s) is not None]
        optax = f"all but {', '.join(failing)}" if failing else "all pass"
        ours = "; ".join(filter(None, (_failure(row, s) for s in subjects.OURS))) or "all pass"
    cells = (row.name, row.summary, optax, ours)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _failure(row: situation.Situation, subject: subjects.Subject) -> str | None:
    """What the table says of a subject that fails, or that passes against its reason."""
    error, reason = row.outcome(subject), row.reasons.get(subject.name)
    if error is None:
        return f"**{subject.name} passes, and has a reason why not**" if reason else None
    if reason:
        return f"{subject.name}: {reason}"
    return f"**{subject.name} fails**: {type(error).__name__}: {str(error)[:100]}"


def main(names: Sequence[str]) -> None:
    """Prints the rows of these groups and situations, or all."""
    rows = [r for r in situation.declared() if not names or {r.name, r.group} & set(names)]
    for group in situation.GROUPS:
        of_group = [r for r in rows if r.group == group]
        if of_group:
            print(f"\n## {group.capitalize()}\n")
            print("| situation | what it does | Optax | ours |\n| --- | --- | --- | --- |")
            for row in of_group:
                print(_row(row), flush=True)


if __name__ == "__main__":
    # As in tests: devices for meshes, and no warning passes unseen.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("error")
    main(sys.argv[1:])
