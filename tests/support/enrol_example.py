"""A plugin of pytest that enrols the variant of docs/add_a_variant.md in the registry.

`pytest -p tests.support.enrol_example tests/contract -k sgd` runs every contract on it. The
package itself does not have it, so the registry that all other tests see does not, either.
"""

from tests import registry
from tests.support import pages

_MODULE = pages.example_variant()


def entries() -> tuple[registry.Entry, ...]:
    """The rows that a variant adds to the registry."""
    skips = {
        "tiny_gradients": "a step of SGD is as small as its gradient",
        "vector_rule": "one rule has all leaves",
    }
    memory_free = {"keep_prev_grad": False, "max_norm": None}
    rows = {
        "mars_sgd": ("optimizer", {"learning_rate": 0.1}),
        "mars_sgd_clip": ("optimizer", {"learning_rate": 0.1, "max_norm": 1.0}),
        "mars_sgd_without_prev_grad": ("optimizer", {"learning_rate": 0.1, **memory_free}),
        "scale_by_mars_sgd": ("direction", {}),
    }
    return tuple(
        registry.Entry(
            name,
            _MODULE.scale_by_mars_sgd if kind == "direction" else _MODULE.mars_sgd,
            kind,
            kwargs,
            "mixed",
            core=name.endswith("mars_sgd"),
            skips=skips,
        )
        for name, (kind, kwargs) in rows.items()
    )


def pytest_configure() -> None:
    """Enrols them, before the test files select their entries."""
    registry.ENTRIES += entries()
