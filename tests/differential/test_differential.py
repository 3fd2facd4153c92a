"""Where Optax works, this package works: the table of `situation.py`, subject by subject."""

import functools

import jax
import pytest

from tests.differential import situation, subjects

_SITUATIONS = situation.declared()


def _crossed(name: str, some: tuple[subjects.Subject, ...]):
    """A parameter of `pytest` for each pair, marked slow where its situation or subject is."""

    def pair(s: situation.Situation, subject: subjects.Subject):
        marks = [pytest.mark.slow] if s.slow or subject.slow else []
        return pytest.param(s, subject, id=f"{s.name}-{subject.name}", marks=marks)

    return pytest.mark.parametrize(("row", name), [pair(s, x) for s in _SITUATIONS for x in some])


def _skip_if_missing(row: situation.Situation) -> None:
    missing = row.missing()
    if missing:
        pytest.skip(f"needs {missing}")


class TestDifferences:
    @pytest.mark.parametrize(
        "row",
        [
            pytest.param(s, id=s.name, marks=[pytest.mark.slow] if s.slow else [])
            for s in _SITUATIONS
        ],
    )
    def test_optax_passes(self, row: situation.Situation):
        """In a situation that no optimizer of Optax passes there is nothing to compare with."""
        _skip_if_missing(row)
        errors = []
        for subject in subjects.OPTAX:
            error = row.outcome(subject)
            if error is None:
                return
            errors.append(f"{subject.name}: {type(error).__name__}: {error}")
        pytest.fail("correct the situation:\n" + "\n".join(errors))

    @_crossed("subject", subjects.OURS)
    def test_ours_pass_or_the_table_says_why_not(
        self, row: situation.Situation, subject: subjects.Subject
    ):
        _skip_if_missing(row)
        reason = row.reasons.get(subject.name)
        if reason is None:
            row.check(subject)
        else:
            assert row.outcome(subject) is not None, f"it passes; delete the reason: {reason}"
