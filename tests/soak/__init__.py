"""A slice of the long run."""
