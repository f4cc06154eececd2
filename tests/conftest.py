"""What holds for every test: property tests try the same examples on every machine, and take the time that they need."""

import pytest
from hypothesis import settings

settings.register_profile("ratchet", derandomize=True, deadline=None)
settings.load_profile("ratchet")


@pytest.fixture(scope="session")
def own_environment() -> dict[str, str]:
    """Variables of the loop's services (tests/integration/loop/conftest.py) beside those of their stack; a folder overrides it."""
    return {}
