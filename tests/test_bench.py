"""The benchmarks run in their quick form, count what they say and end with one JSON line; ratios are not asserted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
KEYS = {"name", "ratio", "gate", "goal", "limit", "equal"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def section(name: str) -> str:
    """What RESULTS.md says of a benchmark."""
    text = (BENCH / "RESULTS.md").read_text() if (BENCH / "RESULTS.md").is_file() else ""
    return text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]


def quick(name: str, *options: str, keys: set[str] = KEYS) -> tuple[list[str], dict[str, Any]]:
    """Lines printed before the last, and the last."""
    before = section(name)
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH.parent)
    assert done.returncode == 0, done.stderr
    assert section(name) == before  # quick figures are not written down
    *table, last = done.stdout.strip().splitlines()
    result = json.loads(last)
    assert set(result) >= keys
    assert result["name"] == name
    assert result["equal"] is True
    assert result["ratio"] > 1
    assert any(line.startswith("|") for line in table)
    return table, result


def test_training_cost_runs_the_towers_once():
    _, result = quick("training_cost")
    tiny = result["models"]["tiny"]
    assert (tiny["images"], tiny["items"]) == (26, 31)  # 18,041 items on 15,366 images
    assert tiny["live_forwards"] == [20 * 31, 20 * 31 * 11]
    assert tiny["stored_forwards"] == [26, 31 * 11]
    assert tiny["difference"] <= 1e-5
    assert result["ratio"] <= result["limit"] * 1.1
    assert tiny["backbone"] > 0 < tiny["head"]


def test_sweep_cost_shares_one_pass():
    _, result = quick("sweep_cost")
    row = result["measured"]
    assert result["runs"] == 12
    assert row["live_forwards"] == [12 * 20 * 8, 12 * 20 * 8 * 11]
    assert row["stored_forwards"] == [7, 8 * 11]
    assert row["difference"] <= 1e-5


def test_evaluation_cost_sees_each_image_once(shared):
    _, result = quick("evaluation_cost", "--data", str(shared / "data" / "fgovd" / "benchmarks"))
    three, six = result["files"]["three"], result["files"]["six"]
    assert (three["requests"], three["images"]) == (6571, 578)
    assert (six["requests"], six["images"]) == (59975, 1404)
    assert three["captions"] < six["captions"]
    assert three["tiny"]["difference"] <= 2e-5
    assert result["limit"] == pytest.approx(6571 / 578, abs=0.05)


def test_metric_cost_agrees_with_the_public_scorers(shared):
    _, result = quick("metric_cost", "--golden", str(shared / "golden"))
    assert {"ratio_ranks", "ratio_12_heads", "ratio_torchmetrics"} <= set(result)


def test_attention_cost_gives_the_same_tokens():
    _, result = quick("attention_cost", "--side", "192")
    assert result["measured"]["patches"] == 144
    assert result["measured"]["difference"] <= 1e-4


def test_comparison_cost_equals_scoring_anew():
    _, result = quick("comparison_cost", keys={"name", "ratio", "equal"})  # nothing asks for a speed here
    assert result["images"] == 200


@pytest.mark.parametrize("name", ["evaluation_cost", "metric_cost"])
def test_absent_files_are_told(name, tmp_path):
    option = "--data" if name == "evaluation_cost" else "--golden"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), option, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert option in done.stderr
