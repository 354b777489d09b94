"""Fixtures that several test folders share."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from llmpq.dist.launch.process_environment import usable_isas
from llmpq.profiler.device import cpu_name

# Time is never tested: the machines are shared, and a slow example is not a wrong one.
settings.register_profile("llmpq", parent=settings(), deadline=None)
settings.load_profile("llmpq")
# A shell starts what runs in its background with SIGINT ignored, which every child inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """State what the results hold for: the processor and the newest extension of this process."""
    newest = usable_isas(os.environ)[-1:]
    return f"processor: {cpu_name()}, up to {', '.join(newest) or 'unknown extensions'}"


@pytest.fixture(scope="session", autouse=True)
def no_store_of_the_user() -> Iterator[None]:
    """Commands under test neither read nor fill the store of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMPQ_STORE", "off")
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_searches() -> Iterator[None]:
    """Searches for fleets end with a proof, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmpq.assigner.fleet.planner.TIME_LIMIT_S", 3600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_switch_of_kernels() -> Iterator[None]:
    """Rows switch between bf16 kernels at the same count everywhere: nothing hangs on timings."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # folders without torch tests need not import it
            from llmpq.kernels import registry  # noqa: PLC0415
            from llmpq.kernels.cpu import dense, step  # noqa: PLC0415

            patch.setattr(registry, "gemv_max_rows", lambda bits: 0 if bits == 8 else 8)
            for module in (registry, step):
                patch.setattr(module, "is_float_faster", lambda: False)
            for module in (dense, step):
                patch.setattr(module, "few_dense_rows", lambda: None)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory of seeded tiny checkpoints: ``tiny_model("llama", seed=1, vocab_size=50)``.

    Arguments are those of ``save_tiny_model``; equal calls share one directory, so a test that
    changes the files copies them first.
    """
    made: dict[str, Path] = {}

    def factory(family: str, **options: object) -> Path:
        key = json.dumps([family, options], sort_keys=True, default=str)
        if key not in made:
            # Folders without torch tests need not import it.
            from helpers.tiny_models import save_tiny_model  # noqa: PLC0415

            made[key] = save_tiny_model(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return factory
