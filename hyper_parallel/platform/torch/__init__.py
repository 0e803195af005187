"""The Platform contract on torch."""
