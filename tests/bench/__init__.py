"""Measurements. Speed is never asserted in tests; it is measured here, against a rival in the same run."""
