"""The choice of a head: a pure function of validation figures."""

import pytest

from noctowl.selection import pick, usable_rule

INF = float("inf")
BEFORE = {"epoch": -1, "map": 0.9, "lvis_ap": 0.40}


def history(*figures: tuple[float, float]) -> list[dict[str, float]]:
    return [BEFORE, *({"epoch": i, "map": fine, "lvis_ap": coarse} for i, (fine, coarse) in enumerate(figures))]


def test_largest_gain_within_the_loss_that_is_allowed():
    entries = history((0.2, 0.39), (0.5, 0.36), (0.6, 0.34), (0.5, 0.38))
    assert pick(entries, rule="tradeoff", max_coarse_loss=0.05) == 2  # 0.5 at a loss of 0.04; of equal ones the earlier
    assert pick(entries, rule="tradeoff", max_coarse_loss=0.03) == 4
    assert pick(entries, rule="tradeoff", max_coarse_loss=0.1) == 3
    assert pick(entries, rule="published", max_coarse_loss=0.0) == 3


def test_where_none_keeps_enough_the_one_that_loses_least():
    entries = history((0.6, 0.1), (0.2, 0.3), (0.5, 0.3))
    assert pick(entries, rule="tradeoff", max_coarse_loss=0.05) == 2


def test_the_pretrained_head_is_no_candidate():
    for rule in ("tradeoff", "published"):
        assert pick([BEFORE], rule=rule, max_coarse_loss=0.05) is None
    assert pick(history((0.0, 0.4)), rule="published", max_coarse_loss=0, start=0.0) is None
    assert pick(history((0.0, 0.4)), rule="published", max_coarse_loss=0) == 1


@pytest.mark.parametrize("rule", ["tradeoff", "published"])
def test_keeping_the_winner_of_each_epoch_keeps_the_winner_of_all(rule):
    figures = [(0.2, 0.1), (0.3, 0.37), (0.6, 0.2), (0.5, 0.36), (0.4, 0.4), (0.5, 0.4)]
    kept = None
    for n in range(1, len(figures) + 1):
        if pick(history(*figures[:n]), rule=rule, max_coarse_loss=0.05) == n:
            kept = n
    assert kept == pick(history(*figures), rule=rule, max_coarse_loss=0.05)


def test_the_rule_that_can_be_used(caplog):
    caplog.set_level("WARNING")  # whatever a scorer tested before has silenced
    assert usable_rule("tradeoff", compat="training", has_coarse=True) == "tradeoff"
    assert usable_rule("tradeoff", compat="published", has_coarse=True) == "published"
    assert not caplog.records
    assert usable_rule("tradeoff", compat="training", has_coarse=False) == "published"
    assert "data.coarse_val_file" in caplog.text
