"""Several ranks on one host, in real processes."""
