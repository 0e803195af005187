"""The version, in one place that the build can read without importing anything else; and the torch releases it is tested on."""

__version__ = "0.1.0"

TESTED_TORCH = ("2.8", "2.11", "2.13", "2.15")
"""Oldest first. ``doctor`` and ``make test-versions`` read this list; a test holds README and pyproject to it."""
