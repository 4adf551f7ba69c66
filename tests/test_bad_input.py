"""What goes wrong is told: one message with what to mend, exit code 2, no traceback. Through the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from noctowl.cli import main as cli
from noctowl.model import OwlDetector
from noctowl.module import NoctOWL

pytestmark = pytest.mark.faults
LONG = "A red plastic cup with a blue and a green and a yellow stripe near the top."  # over 16 tokens


@pytest.fixture
def root(fgovd, tmp_path) -> Path:
    """A small valid data root: two images, one file used for training, validation and the benchmark."""
    root = tmp_path / "root"
    for name, size in (("val2017/000000000000.jpg", (100, 50)), ("train2017/000000000007.jpg", (64, 64))):
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (200, 10, 10)).save(root / "images" / name)
    write(root, fgovd)
    return root


def write(root: Path, data, name: str = "1_attributes") -> Path:
    path = root / "annotations" / "benchmarks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.fixture
def fails(command, root):
    """fails(*overrides): the message of a training command on `root` that must fail with exit code 2."""

    def call(*overrides: str, entry: str = "train") -> str:
        called = command(entry, *settings(root, entry), *overrides)
        assert called.code == 2, called.out
        assert called.err.startswith("error: ")
        assert "Traceback" not in called.err
        assert "results:" not in called.out
        return called.err

    return call


def settings(root: Path, entry: str = "train") -> list[str]:
    common = ["model=tiny", "model.source=tiny", "model.weights=random", "data=fgovd", f"data.root={root}"]
    common += ["benchmark.short_vocabularies=keep", "data.short_vocabularies=keep"]
    files = ["data.train_file=benchmarks/1_attributes.json", "data.val_file=benchmarks/1_attributes.json"]
    return common + files + (["trainer.max_epochs=1", "distill=none"] if entry == "train" else [])


def test_the_sound_root_trains(command, root):
    called = command("train", *settings(root))
    assert called.code == 0, called.err
    assert called.results["counts"]["training"]["vocabularies_trained"] == 3


# Data


def test_missing_root(fails, tmp_path):
    message = fails(f"data.root={tmp_path / 'nowhere'}")
    assert f"data.root: the folder {tmp_path / 'nowhere'} is missing" in message


def test_missing_train_file_lists_what_is_there(fails):
    message = fails("data.train_file=training_sets/1_attributes.json")
    assert "training_sets/1_attributes.json: the annotation file is missing" in message
    assert "Annotation files there: benchmarks/1_attributes.json" in message


def test_missing_image(fails, root):
    (root / "images" / "train2017" / "000000000007.jpg").unlink()
    assert "000000000007.jpg: the image file is missing" in fails()


def test_missing_image_met_by_a_worker_process(fails, root):
    (root / "images" / "train2017" / "000000000007.jpg").unlink()
    assert "000000000007.jpg: the image file is missing" in fails("trainer.num_workers=1", "features=live")


@pytest.mark.parametrize("damage", ["truncated", "empty", "no image"])
def test_damaged_image(fails, root, damage):
    path = root / "images" / "val2017" / "000000000000.jpg"
    content = {"truncated": path.read_bytes()[:400], "empty": b"", "no image": b"<html>not found</html>" * 20}[damage]
    path.write_bytes(content)
    message = fails()
    assert f"{path}: cannot be read as an image" in message
    assert f"({len(content)} bytes). Download it again." in message


def test_image_of_another_size(fails, root):
    Image.new("RGB", (90, 50)).save(root / "images" / "val2017" / "000000000000.jpg")
    message = fails()
    assert "000000000000.jpg" in message
    assert "90 x 50" in message
    assert "100 x 50" in message


def test_unknown_category(fails, root, fgovd):
    fgovd["annotations"][1]["neg_category_ids"] = [40, 999]
    write(root, fgovd)
    message = fails()
    assert "annotation 3: unknown category id 999 in 'neg_category_ids'" in message


def test_no_annotations(fails, root, fgovd):
    fgovd["annotations"] = []
    write(root, fgovd)
    assert "no object is left: the list 'annotations' is empty" in fails()


def test_truncated_annotation_file(fails, root, fgovd):
    write(root, json.dumps(fgovd)[:200])
    assert "not valid JSON" in fails()


def test_path_that_leaves_the_root(fails, root, fgovd):
    fgovd["images"][0]["file_name"] = "../../secret.jpg"
    write(root, fgovd)
    assert "'../../secret.jpg' leaves the images' folder" in fails()


@pytest.fixture
def long_root(root, fgovd):
    """The first vocabulary's second negative is over the token limit."""
    fgovd["categories"][2]["name"] = LONG
    write(root, fgovd)
    return root


def test_long_caption_is_dropped(command, long_root):
    called = command("train", *settings(long_root), "data.token_policy=drop")
    assert called.code == 0, called.err
    counts = called.results["counts"]
    assert counts["training"]["captions_over_limit"] == 1
    assert (counts["training"]["vocabularies_trained"], counts["training"]["objects_trained"]) == (2, 2)
    assert counts["fgovd/hard"]["n5"]["objects_dropped_tokens"] == 2


def test_long_caption_is_cut(command, long_root):
    called = command("train", *settings(long_root), "data.token_policy=truncate")
    assert called.code == 0, called.err
    counts = called.results["counts"]
    assert counts["training"]["captions_over_limit"] == 1
    assert counts["training"]["vocabularies_trained"] == 3
    assert counts["fgovd/hard"]["n5"]["objects_dropped_tokens"] == 0


def test_long_caption_is_refused(fails, long_root):
    message = fails("data.token_policy=error")
    assert LONG in message
    assert "the limit is 16" in message
    assert "'drop' or 'truncate'" in message


def test_more_negatives_than_any_vocabulary_has(fails):
    message = fails("benchmark.n_negatives=[7]", "benchmark.short_vocabularies=drop", "test=true")
    assert "1_attributes.json: N = 7 negatives asked, no vocabulary has more than 2" in message
    message = fails("data.n_negatives=7", "data.short_vocabularies=drop")
    assert "none of its 3 vocabularies can be trained on" in message
    assert "Longest negative list: 2, asked: data.n_negatives=7" in message


# Configuration


def test_unknown_loss(fails):
    message = fails("loss=tripplet")
    assert "loss (command line): found 'tripplet'; allowed: bce, cross_entropy, triplet" in message
    assert "did you mean 'triplet'?" in message


def test_negative_margin(fails):
    assert "loss.margin (command line): found -0.1; allowed: a number >= 0" in fails("loss.margin=-0.1")


def test_problems_are_told_together_and_nothing_is_written(command, root, tmp_path):
    options = ["loss.margin=-0.1", "trainer.max_epochs=0", "optimiser.lr=1", f"output_dir={tmp_path / 'out'}"]
    called = command("train", *settings(root), *options)
    assert called.code == 2
    assert called.err.startswith("error: 3 problems in the configuration:")
    assert not (tmp_path / "out").exists()


# Models


@pytest.fixture(scope="module")
def folders(fresh_detector, tmp_path_factory) -> dict[str, Path]:
    """A miniature of each family as transformers saves it."""
    found = {}
    for kind in ("owlv2", "owlvit"):
        detector: OwlDetector = fresh_detector(kind)
        found[kind] = tmp_path_factory.mktemp(kind)
        detector.model.save_pretrained(found[kind])
        detector.processor.save_pretrained(found[kind])
    return found


def test_checkpoint_of_another_base(command, fails, root, tmp_path):
    run = tmp_path / "run"
    assert command("train", *settings(root), f"run_dir={run}", "test=false").code == 0
    message = fails(f"checkpoint={run}", "model.recipe.seed=1", entry="evaluate")
    assert "trained on another base model" in message
    assert "tiny (random weights, seed 1)" in message


def test_owlvit_folder_as_owlv2(fails, folders):
    message = fails(f"checkpoint={folders['owlvit']}", entry="evaluate")
    assert f"{folders['owlvit']} holds an OWL-ViT model" in message
    assert "where OWLv2 is expected" in message


def test_folder_with_damaged_weights(fails, folders, tmp_path):
    copy = shutil.copytree(folders["owlv2"], tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert str(copy) in fails(f"checkpoint={copy}", entry="evaluate")


def test_checkpoint_that_does_not_exist(fails, tmp_path):
    message = fails(f"checkpoint={tmp_path / 'nowhere'}", entry="evaluate")
    assert str(tmp_path / "nowhere") in message


def test_run_without_its_head(fails, command, root, tmp_path, caplog):
    run = tmp_path / "run"
    assert command("train", *settings(root), f"run_dir={run}", "test=false").code == 0
    head = run / "checkpoints" / "best.safetensors"
    whole, results = head.read_bytes(), run / "results.json"
    told = json.loads(results.read_text())
    right, wrong = told["provenance"]["head_sha256"], "0" * 64
    assert right != wrong
    told["provenance"]["head_sha256"] = wrong
    results.write_text(json.dumps(told))
    message = fails(f"checkpoint={run}", entry="evaluate")
    assert f"{head} is not the head that {results} is about" in message
    assert right in message
    assert wrong in message
    results.unlink()
    with caplog.at_level("WARNING"):
        assert command("evaluate", *settings(root, "evaluate"), f"checkpoint={run}").code == 0
    assert f"{run} has no results.json: the run has not finished, this is its best head so far" in caplog.messages
    head.write_bytes(whole[:100])
    assert f"{head} is not a readable head file" in fails(f"checkpoint={run}", entry="evaluate")
    head.unlink()
    assert f"{head} is missing: the run has not kept an epoch yet" in fails(f"checkpoint={run}", entry="evaluate")


def test_no_network(root, tmp_path):
    """A hub model without network: told in seconds, in a process of its own since the library reads this once."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    arguments = [*settings(root), "model=owlv2_b16", "trainer=cpu", f"output_dir={tmp_path / 'out'}"]
    arguments = [a for a in arguments if not a.startswith(("model=tiny", "model.source", "model.weights"))]
    script = [sys.executable, str(Path(__file__).parents[1] / "train.py"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "google/owlv2-base-patch16" in done.stderr
    assert "Traceback" not in done.stderr
    assert "offline" in done.stderr.lower()


# Saved predictions


@pytest.fixture(scope="module")
def evaluated(command, small) -> Path:
    options = [o for o in small if not o.startswith("trainer.max_epochs")]
    called = command("evaluate", *options)
    assert called.code == 0, called.err
    return called.folder


def test_predictions_of_an_empty_folder(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    message = fails(f"predictions={tmp_path / 'empty'}", entry="evaluate")
    assert f"{tmp_path / 'empty'} holds no predictions" in message
    assert "nowhere holds no predictions" in fails(f"predictions={tmp_path / 'nowhere'}", entry="evaluate")


@pytest.mark.parametrize("name", ["hard.npz", "token_lengths.npz", "counters.json"])
def test_truncated_predictions(command, evaluated, tmp_path, name):
    copy = shutil.copytree(evaluated, tmp_path / "copy")
    damaged = copy / "predictions" / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    called = command("evaluate", f"predictions={copy}")
    assert called.code == 2
    assert str(damaged) in called.err
    assert "Traceback" not in called.err


@pytest.mark.parametrize(("content", "words"), [("a: [1\nb: }", "not readable as YAML"), ("a: 1", "found nothing")])
def test_damaged_configuration_of_a_run(command, evaluated, tmp_path, content, words):
    copy = shutil.copytree(evaluated, tmp_path / "copy")
    (copy / "config.yaml").write_text(content)
    called = command("evaluate", f"predictions={copy}")
    assert called.code == 2
    assert str(copy / "config.yaml") in called.err
    assert words in called.err


def test_predictions_of_a_changed_annotation_file(command, evaluated, small, world, tmp_path):
    copy = shutil.copytree(world, tmp_path / "world")
    file = copy / "annotations" / "benchmarks" / "1_attributes.json"
    file.write_text(file.read_text() + "\n")
    called = command("evaluate", f"predictions={evaluated}", f"data.root={copy}")
    assert called.code == 2
    assert "the predictions were made for another version of" in called.err


def test_predictions_without_the_benchmark_asked_for(command, evaluated):
    called = command("evaluate", f"predictions={evaluated}", "benchmark.names=[easy]")
    assert called.code == 2
    assert "not ['easy'] (benchmark.names)" in called.err


# Ctrl-C


def test_interrupted_training(command, small, tmp_path, monkeypatch):
    """One line and exit code 130, whether Lightning or the program was at work; resume= only where it can be."""
    step, run = NoctOWL.training_step, tmp_path / "run"

    def interrupted(epoch: int):
        def training_step(self, batch, *rest):
            if self.current_epoch == epoch:
                raise KeyboardInterrupt
            return step(self, batch, *rest)

        return training_step

    handler = signal.getsignal(signal.SIGINT)
    for epoch, end in ((1, f"continue with resume={run}"), (0, "start the run again")):
        monkeypatch.setattr(NoctOWL, "training_step", interrupted(epoch))
        called = command("train", *small, "trainer.max_epochs=2", f"run_dir={run}")
        assert (called.code, called.err.count("\n")) == (130, 1), called.err
        assert called.err.startswith(f"interrupted: {run}; ")
        assert called.err.strip().endswith(end)
        assert signal.getsignal(signal.SIGINT) is handler
        shutil.rmtree(run)


def test_interrupted_elsewhere(command, small, tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("noctowl.run.Preparation.evaluation", interrupt)
    monkeypatch.setattr("noctowl.check.check_data", interrupt)
    options = [o for o in small if not o.startswith("trainer.max_epochs")]
    called = command("evaluate", *options, f"run_dir={tmp_path / 'run'}")
    assert (called.code, called.err) == (130, f"interrupted: {tmp_path / 'run'}; start the evaluation again\n")
    monkeypatch.setattr("noctowl.jobs.compose.dispatch", interrupt)
    called = command("evaluate", *options)
    assert (called.code, called.err) == (130, "interrupted: nothing was written\n")
    assert cli(["check", "data=fgovd", f"data.root={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted: noctowl check\n"


def test_help_shows_the_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli(["--help"])
    said = capsys.readouterr().out
    for line in ("noctowl check data=fgovd data.root=/data/fgovd ", "noctowl features build", "noctowl controls --ann"):
        assert f"\n{line}" in said
    assert "\nnoctowl report RUN..." in said
