"""The program fuzzer: random training programs, run with and without us, compared bitwise."""
