"""Which of several heads is taken: by its validation figures alone, as a pure function of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)
FINE, COARSE = "map", "lvis_ap"  # names in a history: validation mAP, and AP of the coarse validation file


def pick(
    history: Sequence[Mapping[str, Any]], *, rule: str, max_coarse_loss: float, start: float = -float("inf")
) -> int | None:
    """Index of the head that a rule takes; None if there is no candidate.

    Args:
        history: {"epoch", "map", "lvis_ap", …} in the order of training. The entry of epoch -1 is the pretrained head:
            a reference, not a candidate.
        rule: "published" takes the highest validation mAP. "tradeoff" takes it among the heads whose coarse AP is at
            most `max_coarse_loss` below the pretrained head's; where none is, the one that loses least.
        start: what the mAP of the first candidate has to beat under "published".

    Of equal heads the earlier one is taken. So an epoch that is taken from all was also taken from those up to itself,
    and keeping the winner after each epoch keeps the winner of all. A head without a figure counts as -inf.
    """
    worst = -float("inf")
    candidates = [i for i, entry in enumerate(history) if entry["epoch"] != -1]
    fine = {i: history[i].get(FINE, worst) for i in candidates}
    if rule == "published":
        candidates = [i for i in candidates if fine[i] > start]
        return max(candidates, key=fine.__getitem__, default=None)
    before = next(entry[COARSE] for entry in history if entry["epoch"] == -1)
    loss = {i: before - history[i].get(COARSE, worst) for i in candidates}
    kept = [i for i in candidates if loss[i] <= max_coarse_loss]
    if kept:
        return max(kept, key=fine.__getitem__)
    return min(candidates, key=loss.__getitem__, default=None)


def usable_rule(rule: str, *, compat: str, has_coarse: bool) -> str:
    """`rule`, or the published one for compat=published and, with a warning, where no coarse knowledge is measured."""
    if rule == "tradeoff" and compat == "published":
        return "published"
    if rule == "tradeoff" and not has_coarse:
        log.warning(
            "selection.rule=tradeoff needs data.coarse_val_file (an LVIS-format json), which is null: the epoch is "
            "chosen by validation mAP alone, whatever coarse knowledge it loses"
        )
        return "published"
    return rule
