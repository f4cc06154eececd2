"""What holds for every test: property tests try the same examples on every machine, and take the time that they need."""

from hypothesis import settings

settings.register_profile("ratchet", derandomize=True, deadline=None)
settings.load_profile("ratchet")
