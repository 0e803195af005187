"""The version, in one place that the build can read without importing anything else."""

__version__ = "0.1.0"
