"""Where Optax works, this package works: the table of `situation.py`, subject by subject."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.differential import situation, subjects

_SITUATIONS = situation.declared()


def _slow(*rows: situation.Situation | subjects.Subject) -> list[Any]:
    return [pytest.mark.slow] if any(row.slow for row in rows) else []


def _skip_if_missing(row: situation.Situation) -> None:
    missing = row.missing()
    if missing:
        pytest.skip(f"needs {missing}")


class TestDifferences:
    @pytest.mark.parametrize(
        "row", [pytest.param(s, id=s.name, marks=_slow(s)) for s in _SITUATIONS]
    )
    def test_optax_passes(self, row: situation.Situation):
        _skip_if_missing(row)
        row.require_optax()

    @pytest.mark.parametrize(
        ("row", "subject"),
        [
            pytest.param(s, x, id=f"{s.name}-{x.name}", marks=_slow(s, x))
            for s in _SITUATIONS
            for x in subjects.OURS
        ],
    )
    def test_ours_pass_or_the_table_says_why_not(
        self, row: situation.Situation, subject: subjects.Subject
    ):
        _skip_if_missing(row)
        row.enforce(subject)

    @pytest.mark.parametrize(
        ("row", "name"),
        [
            pytest.param(s, name, id=f"{s.name}-{name}", marks=_slow(s))
            for s in _SITUATIONS
            for name, reason in s.reasons.items()
            if "fails alone, too" in reason
        ],
    )
    def test_what_is_said_to_fail_alone_does(self, row: situation.Situation, name: str):
        _skip_if_missing(row)
        ours = next(s for s in subjects.OURS if s.name == name)
        errors = [type(row.outcome(s)) for s in (ours, subjects.INSIDE[name])]
        assert errors[0] is errors[1] is not type(None), errors


def _forgetful(subject: subjects.Subject) -> Any:
    """The subject's optimizer, which forgets the previous gradient after each step."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = subject.tx.update(updates, state, params, **extra)
        forgotten = optax.tree.zeros_like(optax.tree.get_all_with_path(state, "prev_grad")[0][1])
        has_rule = lambda path, _: "vector" not in str(path)  # noqa: E731
        return updates, optax.tree.set(state, has_rule, prev_grad=forgotten)

    return subject.tx._replace(update=update)


class TestTable:
    def test_rows_have_names_of_their_own_and_say_what_they_do(self):
        names = [row.name for row in _SITUATIONS]
        assert len(set(names)) == len(names) >= 40
        assert [row.name for row in _SITUATIONS if not row.summary] == []
        assert {row.group for row in _SITUATIONS} == set(situation.GROUPS)

    def test_reasons_are_of_subjects_that_there_are(self):
        named = {name for row in _SITUATIONS for name in row.reasons}
        assert named <= {subject.name for subject in subjects.OURS}

    # In bfloat16 the tolerance of `mars_m` hides it; `mars_shampoo` orthogonalizes in float32.
    @pytest.mark.parametrize("name", ["mars", "mars_shampoo", "mars_soap", "variance_reduced"])
    def test_a_step_that_forgets_the_previous_gradient_is_noticed(self, name):
        subject = next(s for s in subjects.OURS if s.name == name)
        row = _row(lambda subject: subjects.train(subject, tx=_forgetful(subject)))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            row.enforce(subject)

    def test_numbers_that_are_not_finite_are_noticed(self):
        row = _row(lambda subject: jax.tree.map(lambda x: x * jnp.nan, subjects.plain(subject)))
        with pytest.raises(AssertionError, match="not finite"):
            row.enforce(subjects.OURS[0])
        with pytest.raises(AssertionError, match="correct the situation"):
            row.require_optax()

    def test_a_situation_without_a_result_is_noticed(self):
        with pytest.raises(AssertionError, match="nothing to compare"):
            _row(lambda _: {}).enforce(subjects.OURS[0])

    def test_a_reason_that_no_longer_holds_is_noticed(self):
        row = _row(subjects.plain, reasons={"mars": "it cannot"})
        with pytest.raises(AssertionError, match="delete the reason: it cannot"):
            row.enforce(subjects.OURS[0])
        row.enforce(subjects.OURS[1])

    def test_what_a_version_lacks_is_named(self):
        row = _row(subjects.plain)
        assert row.missing() is None
        assert dataclasses.replace(row, needs=("optax.nothing",)).missing() == "optax.nothing"
        assert dataclasses.replace(row, jax=(99, 1)).missing() == "JAX 99.1"


def _row(run: Any, reasons: Any = None) -> situation.Situation:
    return situation.Situation("row", "flags", run, False, (), (0,), reasons or {})
