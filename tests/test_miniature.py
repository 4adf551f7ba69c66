"""The method's effects on the shipped miniature, in direction and size: not only that things run."""

import pytest

from noctowl.assembly import Preparation
from noctowl.compose import compose
from noctowl.run import evaluate, train_together

FINE, COARSE = "fgovd/hard/n5/map", "lvis/ap"
WORLD = ["data.n_train=700", "data.n_val=40", "data.n_test=160", "trainer=cpu", "trainer.num_workers=0"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Test metrics of the pretrained head, of plain fine-tuning, and with distillation of the published weight."""
    base = tmp_path_factory.mktemp("miniature")
    common = [*WORLD, f"output_dir={base}", f"data.root={base / 'cache'}"]
    quick = ["trainer.progress=false", "selection.every_n_epochs=0", "benchmark.names=[hard,trivial]"]
    sweep = []
    for name, distill in (("plain", "none"), ("distilled", "mse")):
        words = [*common, *quick, f"name={name}", f"distill={distill}"]
        sweep.append((compose("train", words), words))
    runs, failed = train_together(sweep, preparation=Preparation())
    assert not failed
    words = [*common, "benchmark.names=[hard,trivial]"]
    before = evaluate(compose("evaluate", words), overrides=words)
    return {"pretrained": before["metrics"], "plain": runs[0]["metrics"], "distilled": runs[1]["metrics"]}


def test_before_tuning(figures):
    """It knows classes, and of attributes a little: what a pretrained OWL is like."""
    assert figures["pretrained"][COARSE] > 0.55
    assert 0.12 < figures["pretrained"][FINE] < 0.30
    assert figures["pretrained"]["fgovd/trivial/n5/map"] > 0.45


@pytest.mark.parametrize("head", ["plain", "distilled"])
def test_fine_grained_scores_rise(figures, head):
    assert figures[head][FINE] > figures["pretrained"][FINE] + 0.10


def test_plain_fine_tuning_destroys_coarse_knowledge(figures):
    assert figures["plain"][COARSE] < figures["pretrained"][COARSE] / 2


def test_distillation_keeps_it(figures):
    assert abs(figures["distilled"][COARSE] - figures["pretrained"][COARSE]) < 0.05
