"""Situations: ways to use an optimizer, each one function of a subject.

A situation is declared once, in the file of its group:

    @situation()
    def rank_promotion_raises(subject):
        '''`jax_numpy_rank_promotion="raise"`.'''
        with jax.numpy_rank_promotion("raise"):
            return train(subject)

It returns the parameters after the training of `subjects.train`, which have to equal those of the
plain run, or `Results` with an expectation of its own. Where one of Optax's optimizers passes, all
of ours have to, unless `reasons` says why one does not; then it has to fail.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.differential import subjects
from tests.support import trees

GROUPS = (
    "flags",
    "wrappers",
    "trainers",
    "serializers",
    "memory",
    "transformations",
    "meshes",
    "processes",
    "containers",
)


class Results(NamedTuple):
    """What a situation gave and what it should, and a tolerance if the subject's is too small."""

    actual: Any
    expected: Any
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Situation:
    """A way to use an optimizer.

    Attributes:
      name: The function's.
      group: The file's.
      run: The function.
      slow: Whether the quick tests leave it out.
      needs: Dotted names without which it is skipped: modules, or what a version may lack.
      jax: The lowest version of JAX that has what it is about.
      reasons: For the subjects that fail, why. "... fails alone, too" is checked on what is inside.
    """

    name: str
    group: str
    run: Callable[[subjects.Subject], Any]
    slow: bool
    needs: tuple[str, ...]
    jax: tuple[int, ...]
    reasons: Mapping[str, str]

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    def missing(self) -> str | None:
        """What this machine lacks for it, or None."""
        if jax.__version_info__ < self.jax:
            return f"JAX {'.'.join(map(str, self.jax))}"
        for name in self.needs:
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                return name
        return None

    def check(self, subject: subjects.Subject) -> None:
        """Raises unless the subject gives the results that it should."""
        results = self.run(subject)
        if not isinstance(results, Results):
            results = Results(results, subjects.plain(subject))
        assert jax.tree.leaves(results.actual), "nothing to compare"
        for leaf in jax.tree.leaves(results.actual):
            assert np.all(np.isfinite(np.asarray(leaf))), f"not finite: {results.actual}"
        tolerance = max(results.tolerance, subject.tolerance)
        trees.assert_close(results.actual, results.expected, rtol=0, atol=tolerance)

    def outcome(self, subject: subjects.Subject) -> Exception | None:
        """What `check` raises."""
        try:
            self.check(subject)
        # An error of any kind is a situation in which the subject does not work.
        except Exception as error:
            return error
        return None

    def enforce(self, subject: subjects.Subject) -> None:
        """`check`, or where there is a reason for a failure, that it still fails."""
        reason = self.reasons.get(subject.name)
        if reason is None:
            self.check(subject)
        else:
            assert self.outcome(subject) is not None, f"it passes; delete the reason: {reason}"

    def require_optax(self) -> None:
        """Raises if no optimizer of Optax passes: there is nothing to compare ours with."""
        errors = []
        for subject in subjects.OPTAX:
            error = self.outcome(subject)
            if error is None:
                return
            errors.append(f"{subject.name}: {type(error).__name__}: {error}")
        raise AssertionError("correct the situation:\n" + "\n".join(errors))


_DECLARED: list[Situation] = []


def situation(
    *,
    slow: bool = False,
    needs: Sequence[str] = (),
    jax: tuple[int, ...] = (0,),
    reasons: Mapping[str, str] | None = None,
) -> Callable[[Callable[[subjects.Subject], Any]], Callable[[subjects.Subject], Any]]:
    """Declares the function below it as a situation, see `Situation`."""

    def declare(run: Callable[[subjects.Subject], Any]) -> Callable[[subjects.Subject], Any]:
        group = run.__module__.rpartition(".")[2]
        _DECLARED.append(
            Situation(run.__name__, group, run, slow, tuple(needs), jax, dict(reasons or {}))
        )
        return run

    return declare


def declared() -> tuple[Situation, ...]:
    """All situations, group by group."""
    for group in GROUPS:
        importlib.import_module(f"tests.differential.{group}")
    return tuple(_DECLARED)
