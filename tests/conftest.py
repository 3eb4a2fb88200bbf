"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure: no example has a deadline, and slow generation is no finding.
settings.register_profile("populora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("populora")
