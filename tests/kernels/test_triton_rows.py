"""Triton's operators between products in its interpreter, in a process of its own."""

from pathlib import Path

from helpers.triton_interpreter import needs_triton, run_interpreted


@needs_triton
def test_operators_are_those_of_float64_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("rows_interpreted.py"), "-x")
