"""Hypothesis: the same 340 examples a test on every run, unless `--hypothesis-profile=long`."""

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(".pytest_cache/hypothesis")  # what it keeps between runs
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("same", max_examples=340, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=5000, print_blob=True, **_COMMON)
settings.load_profile("same")  # the option comes later, and wins
