"""The bench's loader of the golden predictions, so that there is one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def metric_cost() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "metric_cost.py"
    spec = importlib.util.spec_from_file_location("metric_cost", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
