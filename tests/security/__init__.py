"""Files from others, broken on purpose; and who may read the files that we make."""
