"""The program fuzzer on MindSpore: programs as in ``tests/fuzz``, with ops and schedules that MindSpore has."""
