"""The Triton kernels against their oracles in Triton's interpreter, in a process of their own.

Triton decides when it is imported whether it interprets: the child process sets
``TRITON_INTERPRET`` first. One process for all, as it takes seconds to start.
"""

from pathlib import Path

from helpers.triton_interpreter import needs_triton, run_interpreted

SCRIPTS = sorted(Path(__file__).parent.glob("*_interpreted.py"))


@needs_triton
def test_kernels_agree_with_their_oracles_in_the_interpreter():
    assert len(SCRIPTS) == 4
    run_interpreted(*SCRIPTS)
