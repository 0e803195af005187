"""Far memory: pinned host, pageable host, disk."""
