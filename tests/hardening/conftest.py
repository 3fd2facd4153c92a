"""Hypothesis for these tests: no deadline, as first examples compile, and no examples on disk."""

import hypothesis

hypothesis.settings.register_profile(
    "hardening",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hardening")
