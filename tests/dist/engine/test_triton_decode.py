"""Tokens by Triton's decode attention in its interpreter, in a process of its own."""

from pathlib import Path

from helpers.triton_interpreter import needs_triton, run_interpreted


@needs_triton
def test_tokens_are_those_of_transformers_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("triton_decode_interpreted.py"))
