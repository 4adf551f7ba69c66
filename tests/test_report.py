"""Reports of hand-made runs: figures, comparisons, warnings, errors, and the page in a browser."""

import csv
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import yaml
from PIL import Image

from noctowl import cli, fonts
from noctowl.data.fgovd import read_fgovd
from noctowl.errors import DataError
from noctowl.eval.evidence import Asked
from noctowl.eval.outcome import Outcome
from noctowl.eval.predictions import Predictions
from noctowl.eval.suite import score_all
from noctowl.report import build_report, comparison, graphs, load_runs, write_report
from noctowl.report.comparison import configurations
from noctowl.report.published import lookup, published
from noctowl.report.runs import PUBLISHED_OBJECTS
from noctowl.report.sections import by_signature, headline
from noctowl.report.table import Figure, Table
from noctowl.runfolder import RESULTS_VERSION, write_json

STRANGE = "Ein grünes <b>Türchen</b> & 'café' “日本” ✔ | x."
CONVENTIONS = {
    "ground_truth": "unmasked",
    "short_vocabularies": "keep",
    "nms_iou": 0.5,
    "top": 100,
    "published_median": False,
}


@pytest.fixture
def make_run(tmp_path, fgovd, write_fgovd):
    """make_run("a", seed=0, lead=0.0): a finished run on the hand-made file, with images; lead favours the truth."""
    fgovd["categories"][0]["name"] = STRANGE
    path = write_fgovd(fgovd)
    for file, size in (("val2017/000000000000.jpg", (100, 50)), ("train2017/000000000007.jpg", (64, 64))):
        (tmp_path / "images" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, "navy").save(tmp_path / "images" / file)

    def make(name, *, seed=0, lead=0.0, n=(1, 2), image=96, keep=None, **settings):
        file = read_fgovd(path)
        rng = np.random.default_rng(seed)
        parts = []
        for v in range(len(file)):
            own = file.object_boxes[file.objects(v)]
            logits = rng.normal(size=(len(own), len(file.vocabulary(v))))
            logits[:, 0] += lead
            key = (int(file.image_ids[file.vocab_image[v]]), int(file.positive_ids[v]))
            parts.append((*key, own, logits))
        predictions = Predictions.from_parts(parts, n_negatives=n, settings={"annotations_sha256": file.sha256})
        conventions = CONVENTIONS | settings
        outcome = Outcome({"hard": predictions}, None, {})
        scored = score_all({"hard": file}, outcome, conventions, lengths={"hard": None}, asked=Asked(intervals=50))
        folder = tmp_path / "runs" / f"{name}-{seed}"
        outcome.save(folder / "predictions")
        write_json(folder / "predictions" / "evidence.json", scored["evidence"])
        data = {"name": "fgovd", "root": str(tmp_path), "images": None, "annotations": None, "token_policy": "truncate"}
        config = {"name": name, "seed": seed, "data": data, "loss": {"name": "triplet", "lead": lead}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        results = {
            "version": RESULTS_VERSION,
            **{key: scored[key] for key in ("metrics", "intervals", "controls")},
            "settings": {**conventions, "data": data, "seed": seed},
            "counts": scored["counts"],
            "provenance": {
                "base": "google/owlv2-base-patch16",
                "processor": {"size": [image, image], "frame": "padded", "pad_value": 0.0},
                "annotations": {"hard": {"file": path.name, "sha256": file.sha256}},
            },
        }
        write_json(folder / "results.json", results)
        return folder

    return make


def change(folder, **keys):
    """Results with other values at the top."""
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_three_runs_on_one_page(make_run, tmp_path, capsys):
    runs = [make_run("worse"), make_run("better", lead=3.0), make_run("best", lead=9.0)]
    assert cli.main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    page = tmp_path / "out" / "report.html"
    assert capsys.readouterr().out.strip() == f"report: {page}"
    text = page.read_text()
    assert "Worst and best pictures" in text
    assert text.count("data:image/jpeg") >= 2
    assert text.count("data:image/png") >= 4
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)  # nothing is fetched
    assert "<b>Türchen</b>" not in text
    assert html.escape(STRANGE) in text
    rows = list(csv.DictReader((tmp_path / "out" / "report" / "headline.csv").open()))
    for row, run in zip(rows, runs):
        results = json.loads((run / "results.json").read_text())
        assert float(row["hard N=2"]) == pytest.approx(results["metrics"]["fgovd/hard/n2/map"], rel=1e-5)
        low, high = results["intervals"]["fgovd/hard/n2/map"]
        assert [float(row["hard N=2 low"]), float(row["hard N=2 high"])] == pytest.approx([low, high], rel=1e-5)
    assert [row["run"] for row in rows] == ["worse", "better", "best"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    for image in re.findall(r"\]\((report/[^)]+)\)", markdown):
        assert (tmp_path / "out" / image).is_file()


def test_characters_without_a_font_are_named_once(make_run, monkeypatch):
    monkeypatch.setattr(fonts, "installed", lambda: (fonts.DEJAVU,))
    report = build_report(load_runs([make_run("a"), make_run("本", lead=3.0)]))
    (said,) = [text for text in report.warnings if "no font" in text]
    assert said.startswith(
        "no font of this machine draws 本 (U+672C), 日 (U+65E5): pictures and plots show code points"
    )
    text = write_report([make_run("plain")]).read_text()
    assert html.escape(STRANGE) in text  # the browser has fonts of its own


def test_controls_say_how_the_rankers_were_trained(make_run):
    (table,) = [t for t in build_report(load_runs([make_run("a")])).tables() if t.key == "controls"]
    assert table.columns[-1] == "blind: trained by"
    assert [row[-1] for row in table.rows] == ["cross-validation (1 or more)"] * 2


def test_one_run_writes_into_its_folder(make_run):
    folder = make_run("one")
    assert write_report([folder]) == folder / "report.html"
    assert (folder / "report.md").is_file()
    assert (folder / "report" / "controls.tex").read_text().startswith(r"\begin{table}")


def test_warnings(make_run):
    (run,) = load_runs([make_run("one")])
    said = "\n".join(run.warnings)
    assert f"hard 4 of {PUBLISHED_OBJECTS['hard']}" in said
    assert "the image side is 96, that of the published owlv2-base is 960" in said
    assert "captions over the token limit were cut" in said
    assert "vocabularies with fewer than N negatives were kept" in said
    assert "other numbers of negatives" in said


def test_unlike_settings_are_never_in_one_column(make_run):
    folders = [make_run("a"), make_run("b", ground_truth="masked"), make_run("c", image=960), make_run("d", lead=1.0)]
    runs = load_runs(folders)
    groups = by_signature(runs)
    assert [[run.label for run in group] for group in groups] == [["a", "d"], ["b"], ["c"]]
    report = build_report(runs)
    heads = [table for table in report.tables() if table.key.startswith("headline")]
    assert [[row[0] for row in table.rows] for table in heads] == [["a", "d"], ["b"], ["c"]]
    assert any("b (ground_truth masked instead of unmasked)" in text for text in report.warnings)
    assert any("c (image 960x960 instead of 96x96)" in text for text in report.warnings)


def test_other_n_is_another_column(make_run):
    table = headline(load_runs([make_run("a", n=(1,)), make_run("b", n=(1, 2))]))
    assert table.columns == ("run", "hard N=1", "hard N=2", "source")
    assert table.rows[0][2] is None
    assert isinstance(table.rows[1][2], Figure)


def test_published_figures_beside_a_whole_benchmark_only(make_run):
    folder = make_run("whole", short_vocabularies="drop", n=(1,))
    results = json.loads((folder / "results.json").read_text())
    results["metrics"]["fgovd/hard/n5/map"] = 0.4
    results["counts"]["fgovd/hard"]["objects"] = PUBLISHED_OBJECTS["hard"]
    results["settings"]["data"]["token_policy"] = "drop"
    change(folder, **results)
    rows = {row[0]: row for row in headline(load_runs([folder])).rows}
    assert rows["NoctOWLv2 (L/14)"][2].value == pytest.approx(0.502)
    assert rows["NoctOWLv2 (L/14)"][1] is None  # nothing is published at N = 1
    results["counts"]["fgovd/hard"]["objects"] -= 1
    change(folder, **results)
    assert [row[0] for row in headline(load_runs([folder])).rows] == ["whole"]


def test_published_points_in_the_tradeoff_plot(make_run, monkeypatch):
    """All methods that have both figures, where it is LVIS v1 val and the whole benchmark; none otherwise."""
    folder = make_run("whole", short_vocabularies="drop", n=(1,))
    results = json.loads((folder / "results.json").read_text())
    results["metrics"] |= {"fgovd/hard/n5/map": 0.4, "lvis/ap": 0.3, "lvis/ap_rare": 0.2}
    results["counts"] |= {"lvis": {"classes": 1203, "images": 19809}}
    results["counts"]["fgovd/hard"]["objects"] = PUBLISHED_OBJECTS["hard"]
    results["settings"]["data"]["token_policy"] = "drop"
    change(folder, **results)
    monkeypatch.setattr(graphs, "_png", lambda canvas, axes: axes)
    drawn = {text.get_text(): text.xy for text in graphs.tradeoff(load_runs([folder])).texts}
    assert drawn["NoctOWL (L/14)"] == (48.6, 26.0)
    assert drawn["Detic"] == (11.5, 39.9)
    assert len(drawn) == 12
    results["counts"]["lvis"]["images"] = 19808
    change(folder, **results)
    assert list(graphs.tradeoff(load_runs([folder])).texts) == []


def test_published_table():
    rows = published()
    assert len(rows) == 257
    assert all(row.source.strip() for row in rows)
    assert [row.method for row in rows if not re.fullmatch(r"20[12]\d-(0[1-9]|1[0-2])(-[0-3]\d)?", row.date)] == []
    undated = {row.method for row in rows if "prints no date" in row.note}
    assert {name.split(" (")[0] for name in undated} == {"NoctOWL", "NoctOWLv2"}
    assert {row.source_kind for row in rows} == {"primary", "secondary"}
    detic = lookup("detection")["Detic"]["transparency", 2, "map"]
    assert detic.value == 24.6
    assert "erratum" in detic.note
    ablation = [row for row in rows if row.method.endswith("CE loss") and row.protocol == "detection"]
    assert {row.benchmark for row in ablation} == {"color", "material", "pattern", "transparency"}
    assert all(row.note.startswith("erratum: in that table the columns Trivial") for row in ablation)
    assert sum("erratum" in row.note for row in rows) == 1 + 4 * 4
    assert lookup("lvis_v1_val")["NoctOWL (B/16)"]["lvis", None, "ap_rare"].value == 11.6


def test_published_table_is_the_reference(shared):
    with (shared / "reference" / "published.csv").open() as file:
        wanted = {
            (r["method"], r["backbone"], r["benchmark"], r["n_neg"], r["metric"], r["value"])
            for r in csv.DictReader(file)
        }
    found = {(r.method, r.backbone, r.benchmark, str(r.n_neg or ""), r.metric, str(r.value)) for r in published()}
    assert found == wanted


def test_paired_comparison(make_run):
    """Differences are those of the figures; the whole table is one family for Holm."""
    report = build_report(load_runs([make_run("a"), make_run("b", lead=9.0)]))
    (table,) = [table for table in report.tables() if table.key == "comparison"]
    rows = [dict(zip(table.columns, row)) for row in table.rows]
    assert [(row["N"], row["figure"]) for row in rows] == [(1, "mAP"), (1, "top-1"), (2, "mAP"), (2, "top-1")]
    for row in rows:
        assert row["a − b"].value == pytest.approx(row["mean a"].value - row["mean b"].value)
        assert row["p"].value <= row["p (Holm)"].value <= 1
    a, b = (
        json.loads((run.folder / "results.json").read_text())["metrics"]
        for run in load_runs([make_run("a"), make_run("b", lead=9.0)])
    )
    assert rows[2]["a − b"].value == pytest.approx(a["fgovd/hard/n2/map"] - b["fgovd/hard/n2/map"], abs=1e-5)


def test_permutations_grow_with_the_table(make_run, monkeypatch):
    """100 a row, 5,000 at least: the smallest p that can be had passes Holm's correction."""
    asked = []
    real = comparison.compare
    monkeypatch.setattr(comparison, "compare", lambda *a, **k: asked.append(k["permutations"]) or real(*a, **k))
    runs = load_runs([make_run(name, lead=lead) for name, lead in zip("abcde", range(5))])
    assert len(comparison.comparisons(runs)[0].rows) == 16  # two N, two figures, each of four with the first
    monkeypatch.setattr(comparison, "PER_ROW", 1000)
    comparison.comparisons(runs)
    assert set(asked[:16]) == {5000}
    assert set(asked[16:]) == {16_000}


def test_seeds_are_averaged(make_run):
    runs = load_runs([make_run("x", seed=s, lead=lead) for lead in (0.0, 2.0) for s in (0, 1)][:2])
    assert {k: len(v) for k, v in configurations(runs).items()} == {"x (2 seeds)": 2}
    runs = load_runs([make_run("x", seed=0), make_run("x", seed=1), make_run("y", lead=2.0)])
    (table,) = [table for table in build_report(runs).tables() if table.key == "comparison"]
    assert {row[3:5] for row in table.rows} == {("x (2 seeds)", "y, seed 0")}


def test_results_of_another_version_and_missing_ones(make_run, tmp_path, capsys):
    folder = make_run("old")
    change(folder, version=99)
    assert cli.main(["report", str(folder)]) == 2
    assert f"version 99; this noctowl reads version {RESULTS_VERSION}" in capsys.readouterr().err
    (folder / "results.json").unlink()
    with pytest.raises(DataError, match="the run has not finished"):
        load_runs([folder])
    with pytest.raises(DataError, match="no such run folder"):
        load_runs([tmp_path / "nothing"])
    with pytest.raises(DataError, match="no run is given"):
        load_runs([])
    folder = make_run("damaged")
    (folder / "predictions" / "evidence.json").write_text("{")
    with pytest.raises(DataError, match=r"evidence.json: not readable"):
        load_runs([folder])


def test_a_run_without_figures(make_run):
    folder = make_run("empty")
    change(folder, metrics={}, intervals={}, controls={}, counts={})
    (folder / "predictions" / "evidence.json").unlink()
    text = write_report([folder]).read_text()
    assert "there are no figures" in text


def test_one_image(make_run, fgovd, write_fgovd):
    """Intervals are points, nothing can be told apart, and the page says why."""
    fgovd["annotations"] = [a for a in fgovd["annotations"] if a["image_id"] == 7]
    fgovd["images"] = [image for image in fgovd["images"] if image["id"] == 7]
    write_fgovd(fgovd)
    report = build_report(load_runs([make_run("right", n=(1,), lead=9.0), make_run("wrong", n=(1,), lead=-9.0)]))
    tables = {table.key: table for table in report.tables()}
    assert [str(row[1]) for row in tables["headline"].rows] == ["100.0 (100.0–100.0)", "0.0 (0.0–0.0)"]
    assert {row[8].value for row in tables["comparison"].rows} == {1.0}  # p: one coin
    assert any("few images (hard N=1 1)" in text for text in report.warnings)


def test_all_scores_equal(make_run, monkeypatch):
    """A constant detector: every figure is drawn, none is NaN."""

    class Constant:
        def normal(self, size):
            return np.zeros(size)

    real = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: Constant() if seed == 77 else real(seed))
    folder = make_run("constant", seed=77)
    text = write_report([folder]).read_text()
    assert "nan" not in re.sub(r"base64,[^\"]+", "", text).lower().replace("provenance", "")


def test_pictures_are_left_out_with_a_reason(make_run, tmp_path):
    folder = make_run("moved")
    shutil.rmtree(tmp_path / "images")
    text = write_report([folder]).read_text()
    assert "no pictures, as annotations or images are not where the run had them" in text


def test_table_forms():
    figure = Figure(0.12345, (0.1, 0.2), 100)
    table = Table("k", "50 % & more", ("name", "mAP"), (("a_b|<i>", figure), ("c", None)), "note")
    assert table.csv() == "name,mAP,mAP low,mAP high\na_b|<i>,0.12345,0.1,0.2\nc,,,\n"
    assert "a\\_b|<i> & 12.3 (10.0--20.0) \\\\" in table.latex()
    assert "50 \\% \\& more" in table.latex()
    assert "| a\\_b\\|&lt;i> | 12.3 (10.0–20.0) |" in table.markdown()
    assert '<td class="n" data-v="0.12345">12.3 (10.0–20.0)</td>' in table.html()
    assert "a_b|&lt;i&gt;" in table.html()
    assert str(Figure(-0.0001, None, 100)) == "0.0"


PROBE = """<script>
window.addEventListener("load", function () {
  var table = document.getElementById("published"), heads = table.tHead.rows[0].cells, found = {};
  function text(cell) { return cell.dataset.v || cell.textContent; }
  function column(i) { return Array.from(table.tBodies[0].rows, function (r) { return text(r.cells[i]); }); }
  heads[2].click(); found.up = column(2);
  heads[2].click(); found.down = column(2);
  heads[0].click(); found.names = column(0);
  found.images = Array.from(document.images, function (i) { return i.complete && i.naturalWidth > 0; });
  found.requests = performance.getEntriesByType("resource").map(function (e) { return e.name; })
    .filter(function (n) { return n.slice(0, 5) !== "data:"; });
  var out = document.createElement("pre");
  out.id = "probe"; out.textContent = JSON.stringify(found);
  document.body.appendChild(out);
});
</script>"""


@pytest.mark.slow
def test_page_in_a_browser(make_run, tmp_path):
    """No console message, tables sort, pictures load, nothing is requested."""
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    if browser is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    page = write_report([make_run("a"), make_run("b", lead=3.0)], tmp_path / "out")
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [browser, *flags, profile, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=200
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.S)[1]))
    numbers = [float(v) for v in found["up"] if v != "–"]
    assert numbers == sorted(numbers)
    assert len(numbers) > 15
    assert [float(v) for v in found["down"] if v != "–"] == numbers[::-1]
    assert found["names"] == sorted(found["names"], key=str.lower)
    assert len(found["images"]) >= 8
    assert all(found["images"])
    assert found["requests"] == []
