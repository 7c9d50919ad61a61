"""The benchmarks of `tools/bench.py`: one module or package each, with `add_arguments`, `run` and `table`."""
