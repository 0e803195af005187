"""The Platform contract on MindSpore."""
