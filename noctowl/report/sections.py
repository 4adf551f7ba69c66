"""The tables of a report, from one run or many. Figures are percent where the papers print percent."""

from collections.abc import Iterable, Sequence
from typing import Any

from noctowl.eval.blind import training
from noctowl.eval.evidence import TEXT_ONLY
from noctowl.report.published import lookup, published
from noctowl.report.runs import Run, comparable, is_lvis
from noctowl.report.table import Cell, Figure, Table

SIZES = ("small", "medium", "large")
COARSE = ("ap", "ap_50", "ap_75", "ap_rare", "ap_common", "ap_frequent", "ap_small", "ap_medium", "ap_large")


def figure(run: Run, key: str, *, scale: float = 100.0, digits: int = 1) -> Figure | None:
    """A metric or control of a run with its interval; None where it is absent."""
    results = run.results
    value = run.metrics.get(key, results.get("controls", {}).get(key))
    if value is None:
        return None
    bounds = results.get("intervals", {}).get(key)
    return Figure(value, (bounds[0], bounds[1]) if bounds else None, scale, digits)


def cases_of(runs: Iterable[Run]) -> list[tuple[str, int]]:
    """(benchmark, N) of any run, in the order of the papers."""
    found: dict[tuple[str, int], None] = {}
    for run in runs:
        found |= dict.fromkeys(run.cases)
    order = list(dict.fromkeys(b for b, _ in found))
    return sorted(found, key=lambda case: (order.index(case[0]), case[1]))


def by_signature(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose figures may share a column: equal settings, and equal annotation files where both have them."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            same = run.signature == group[0].signature
            if same and all(_same_files(run, other) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _same_files(a: Run, b: Run) -> bool:
    shared = {name for name, _ in a.cases} & {name for name, _ in b.cases}
    return all(not a.file_of(n) or not b.file_of(n) or a.file_of(n) == b.file_of(n) for n in shared)


def unlike(groups: Sequence[Sequence[Run]]) -> list[str]:
    """One sentence for each group after the first: how its settings differ."""
    said = []
    first = groups[0][0] if groups else None
    for group in groups[1:]:
        assert first is not None
        own, other = group[0].signature, first.signature
        differ = [f"{key} {own[key]} instead of {other[key]}" for key in own if own[key] != other[key]]
        names = ", ".join(run.label for run in group)
        what = "; ".join(differ) or "other annotation files"
        said.append(f"unlike settings, shown in tables of their own: {names} ({what})")
    return said


def headline(runs: Sequence[Run], tail: str = "") -> Table:
    """mAP of every benchmark and N of one signature, beside published figures where all objects are the same."""
    cases = cases_of(runs)
    rows: list[tuple[Cell, ...]] = [
        (run.label, *(figure(run, f"fgovd/{b}/n{n}/map") for b, n in cases), "this report") for run in runs
    ]
    beside = [case for case in cases if runs and all(comparable(r, case[0]) for r in runs if case in r.cases)]
    for method, found in lookup("detection").items():
        cells = [found.get((b, n, "map")) if (b, n) in beside else None for b, n in cases]
        if any(cells):
            source = next(c for c in cells if c)
            values = [Figure(c.value / 100, None, 100) if c else None for c in cells]
            rows.append((method, *values, f"published {source.date}"))
    truth = runs[0].results["settings"].get("ground_truth", "?") if runs else "?"
    note = "mAP over IoU .50 to .95 in percent; in brackets 95 % intervals over images."
    if not beside:
        note += " Published figures stand in a table of their own, as these are not of the same objects and rules."
    columns = ("run", *(f"{b} N={n}" for b, n in cases), "source")
    return Table(f"headline{tail}", f"FG-OVD, mAP, ground truth {truth}", columns, tuple(rows), note)


def published_table() -> Table:
    """Published detection results at the published N, whatever the runs are."""
    cases = [(b, 5) for b in ("hard", "medium", "easy", "trivial")]
    cases += [(b, 2) for b in ("color", "material", "pattern", "transparency")]
    coarse = lookup("lvis_v1_val")
    rows: list[tuple[Cell, ...]] = []
    for method, found in lookup("detection").items():
        cells = [found.get((b, n, "map")) for b, n in cases]
        rare = coarse.get(method, {}).get(("lvis", None, "ap_rare"))
        known = [c for c in (*cells, rare) if c]
        values = [Figure(c.value / 100, None, 100) if c else None for c in (*cells, rare)]
        notes = "; ".join(dict.fromkeys(c.note for c in known if c.note))
        rows.append((method, known[0].backbone, *values, known[0].date, known[0].source, notes))
    columns = ("method", "backbone", *(f"{b} N={n}" for b, n in cases), "LVIS APr", "date", "source", "note")
    note = "As printed by their sources (noctowl/published.csv); mAP and AP in percent."
    return Table("published", "Published results, detection protocol", columns, tuple(rows), note)


def published_boxes() -> Table:
    """Published classification of given boxes: another task, never beside a detector's figures."""
    rows = [r for r in published() if r.protocol == "ground_truth_box"]
    cells: list[tuple[Cell, ...]] = [
        (r.method, r.backbone, r.benchmark, r.n_neg, Figure(r.value / 100, None, 100), r.date, r.source) for r in rows
    ]
    columns = ("method", "backbone", "benchmark", "N", "top-1", "date", "source")
    note = "True boxes are given: to be held against the control “oracle”, not against mAP."
    return Table("published-boxes", "Published top-1 on given boxes", columns, tuple(cells), note)


def details(runs: Sequence[Run], tail: str = "") -> Table:
    """Everything about every benchmark and N: AP by threshold and size, the other convention, ranks, objects."""
    rows: list[tuple[Cell, ...]] = []
    other = "masked" if runs and runs[0].results["settings"].get("ground_truth") != "masked" else "unmasked"
    for run in runs:
        for b, n in run.cases:
            base = f"fgovd/{b}/n{n}"
            maps = [figure(run, f"{base}/{name}") for name in ("map", "map_50", "map_75")]
            maps += [figure(run, f"{base}/map_{size}") for size in SIZES] + [figure(run, f"{base}/{other}/map")]
            ranks = [figure(run, f"{base}/rank_{kind}", scale=1, digits=2) for kind in ("mean", "median")]
            count = run.results["counts"].get(f"fgovd/{b}", {}).get(f"n{n}", {})
            dropped = count.get("objects_dropped_short", 0) + count.get("objects_dropped_tokens", 0)
            rows.append((run.label, b, n, *maps, *ranks, count.get("objects"), dropped))
    columns = ("run", "benchmark", "N", "mAP", "mAP50", "mAP75", *(f"mAP {s}" for s in SIZES), f"mAP {other}")
    columns += ("mean rank", "median rank", "objects", "left out")
    note = "Left out: objects whose vocabulary has too few negatives or captions over the token limit."
    return Table(f"details{tail}", "FG-OVD, all figures", columns, tuple(rows), note)


def coarse(runs: Sequence[Run], tail: str = "") -> Table | None:
    """AP of the coarse classes; published LVIS figures beside it where it is LVIS v1 val."""
    runs = [run for run in runs if "lvis/ap" in run.metrics]
    if not runs:
        return None
    names = [name for name in COARSE if any(f"lvis/{name}" in run.metrics for run in runs)]
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        count, settings = run.results["counts"].get("lvis", {}), run.results["settings"]
        protocol = (settings.get("coarse") or {}).get("protocol", "?")
        figures = [figure(run, f"lvis/{name}") for name in names]
        rows.append((run.label, protocol, *figures, count.get("images"), count.get("classes")))
    if all(is_lvis(run) for run in runs):
        for method, found in lookup("lvis_v1_val").items():
            cells = [found.get(("lvis", None, name)) for name in names]
            if any(cells):
                values = [Figure(c.value / 100, None, 100) if c else None for c in cells]
                rows.append((method, "published", *values, None, 1203))
    titles = tuple(name.upper().replace("AP_", "AP ").lower().replace("ap", "AP", 1) for name in names)
    note = "Percent. Runs of different protocols or files are not to be compared."
    return Table(
        f"coarse{tail}", "Coarse classes", ("run", "protocol", *titles, "images", "classes"), tuple(rows), note
    )


CONTROL_NOTE = (
    "Top-1 per object, percent. model: the rank at the detection is 1. oracle: at the patch that fits the true box "
    "best. shuffled: the same on another image. head_prior: what the head's bias prefers. blind, centroid: text only, "
    "n-grams or the detector's caption embeddings. visual gain: model minus the best text-only control. trained by: "
    "captions given (benchmark.control_captions), or cross-validation inside the benchmark; number of vocabularies."
)


def controls(runs: Sequence[Run], tail: str = "") -> Table | None:
    """Top-1 of the model and of every control, and the gain over the best that sees no image."""
    names = ("model", "oracle", "shuffled", "head_prior", *TEXT_ONLY, "chance")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        for b, n in run.cases:
            base = f"fgovd/{b}/n{n}"
            cells = [figure(run, f"{base}/{name}/top1") for name in names]
            tables = run.evidence.get(b, {}).get(f"n{n}", {})
            learnt = tables.get("trained_on", {}).values()
            how = training(tables.get("training"), min(learnt, default=None))
            if any(cells):
                rows.append((run.label, b, n, figure(run, f"{base}/visual_gain"), *cells, how))
    columns = ("run", "benchmark", "N", "visual gain", *names, "blind: trained by")
    return _table(f"controls{tail}", "Controls and visual gain", columns, rows, CONTROL_NOTE)


def oracle_maps(runs: Sequence[Run], tail: str = "") -> Table | None:
    """mAP that text-only rankers have with all true boxes given, beside the model's own."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        for b, n in run.cases:
            base = f"fgovd/{b}/n{n}"
            cells = [figure(run, f"{base}/{name}/oracle_map") for name in TEXT_ONLY]
            if any(cells):
                rows.append((run.label, b, n, figure(run, f"{base}/map"), *cells))
    columns = ("run", "benchmark", "N", "model's mAP", *TEXT_ONLY)
    note = "The rankers are given every true box; the model has to find it."
    return _table(f"oracle-map{tail}", "mAP without looking", columns, rows, note)


def gains(runs: Sequence[Run], tail: str = "") -> Table | None:
    """The gain of each attribute type, over its own best control."""
    rows: list[tuple[Cell, ...]] = []
    for run, b, n, tables in _tables(runs):
        for kind, row in tables.get("gain", {}).items():
            values = [_interval(row[name]) for name in ("gain", "model", "blind")]
            rows.append((run.label, b, n, kind, *values, row["control"], row["objects"]))
    columns = ("run", "benchmark", "N", "attribute", "visual gain", "model", "best control", "which", "objects")
    note = "Top-1, percent. Attribute: the type that all of an object's negatives change."
    return _table(f"gains{tail}", "Visual gain by attribute type", columns, rows, note)


def breakdown(runs: Sequence[Run], tail: str = "") -> Table | None:
    """Top-1 and ranks by caption length, object size, split, crowd and attribute type."""
    rows: list[tuple[Cell, ...]] = []
    for run, b, n, tables in _tables(runs):
        groups = {"words": tables.get("length", {}).get("bins", {})}
        groups |= {kind: tables.get(kind, {}) for kind in ("size", "split", "crowd", "attribute")}
        for kind, members in groups.items():
            for name, row in members.items():
                top1 = Figure(row["top1"], None, 100)
                ranks = [Figure(row[key], None, 1, 2) for key in ("rank_mean", "rank_median")]
                rows.append((run.label, b, n, kind, name, top1, *ranks, row["objects"]))
    columns = ("run", "benchmark", "N", "by", "group", "top-1", "mean rank", "median rank", "objects")
    note = "words: of the positive caption. crowd: annotated objects of the image. split: COCO folder of the image."
    return _table(f"breakdown{tail}", "Where it is right", columns, rows, note)


def pearson(runs: Sequence[Run], tail: str = "") -> Table | None:
    """Correlation of caption length and rank."""
    rows: list[tuple[Cell, ...]] = []
    for run, b, n, tables in _tables(runs):
        length = tables.get("length")
        if length:
            r = length["pearson"]
            rows.append((run.label, b, n, None if r is None else Figure(r, None, 1, 3), length["objects"]))
    note = "Of the positive caption's words and the object's rank; absent where one of them is constant."
    return _table(
        f"pearson{tail}", "Words and rank: Pearson's r", ("run", "benchmark", "N", "r", "objects"), rows, note
    )


def confusion(run: Run, kind: str) -> dict[str, dict[str, tuple[int, int]]]:
    """{true: {said: (asked, chosen)}} of one attribute type, summed over the run's benchmarks at their largest N."""
    largest = dict(run.cases)  # cases ascend in N
    total: dict[str, dict[str, tuple[int, int]]] = {}
    for b, n in largest.items():
        table = run.evidence.get(b, {}).get(f"n{n}", {}).get("confusions", {}).get(kind, {})
        for true, row in table.items():
            for said, cell in row.items():
                asked, chosen = total.setdefault(true, {}).get(said, (0, 0))
                total[true][said] = (asked + cell["asked"], chosen + cell["chosen"])
    return total


def confusions(runs: Sequence[Run], tail: str = "", most: int = 40) -> Table | None:
    """Substitutions that were believed most often, of each run and type."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        found = [
            (run.label, kind, true, said, Figure(chosen / asked, None, 100), chosen, asked)
            for kind in ("color", "material", "pattern", "transparency")
            for true, row in confusion(run, kind).items()
            for said, (asked, chosen) in row.items()
            if chosen
        ]
        rows += sorted(found, key=lambda row: (-row[5], row[2], row[3]))[:most]
    columns = ("run", "type", "true", "said", "believed", "times", "offered")
    note = "Of the objects that were found. Offered: a negative makes this substitution; believed: its caption won."
    return _table(f"confusions{tail}", "Substitutions that are believed", columns, rows, note)


def settings(runs: Sequence[Run]) -> Table:
    """One row a setting, one column a run."""
    chosen: dict[str, list[Any]] = {}
    for i, run in enumerate(runs):
        config, provenance = run.config, run.results["provenance"]
        flat = {f"score.{k}": v for k, v in run.results["settings"].items() if not isinstance(v, dict)}
        flat |= _flat({k: config.get(k) for k in SETTINGS})
        flat |= {"base": provenance.get("base"), "image": run.signature["image"]}
        for key, value in flat.items():
            chosen.setdefault(key, [None] * len(runs))[i] = value
    rows = [(key, *(None if v is None else str(v) for v in values)) for key, values in chosen.items()]
    return Table("settings", "Settings", ("setting", *(r.label for r in runs)), tuple(rows))


SETTINGS = ("model", "data", "loss", "distill", "optimizer", "schedule", "trainer", "benchmark", "selection", "compat")


def counts(runs: Sequence[Run]) -> Table:
    """Every count of every benchmark and N: what was read, left out, scored."""
    flat = [_flat(run.results["counts"]) for run in runs]
    keys = dict.fromkeys(k for own in flat for k, v in own.items() if isinstance(v, int) and "history" not in k)
    rows = [(key, *(own.get(key) for own in flat)) for key in keys]
    return Table("counts", "Counts", ("count", *(r.label for r in runs)), tuple(rows))


def provenance(runs: Sequence[Run]) -> Table:
    """Versions, hashes, time, code: what it takes to know where a figure comes from."""
    flat = [{"folder": run.folder.name} | _flat(run.results["provenance"]) for run in runs]
    keys = dict.fromkeys(key for own in flat for key in own)
    rows = [(key, *(None if own.get(key) is None else str(own[key]) for own in flat)) for key in keys]
    return Table("provenance", "Provenance", ("fact", *(r.label for r in runs)), tuple(rows))


def _tables(runs: Sequence[Run]):
    for run in runs:
        for b, n in run.cases:
            yield run, b, n, run.evidence.get(b, {}).get(f"n{n}", {})


def _table(key: str, title: str, columns: tuple[str, ...], rows: list, note: str) -> Table | None:
    """None where there is no row; columns without a single value are left out."""
    if not rows:
        return None
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    return Table(key, title, tuple(columns[i] for i in used), tuple(tuple(row[i] for i in used) for row in rows), note)


def _interval(values: Sequence[float] | None) -> Figure | None:
    return None if values is None else Figure(values[0], (values[1], values[2]), 100)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists of scalars as text."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found
