"""One pass over the images equals one forward per vocabulary and N."""

import numpy as np
import pytest
import torch

from noctowl.assembly import make_images
from noctowl.boxes import from_frame
from noctowl.data.files import find_benchmarks
from noctowl.data.images import load_rgb
from noctowl.eval.suite import Suite
from noctowl.features import TextBank, store
from noctowl.text import tokenize

CPU = torch.device("cpu")
WORK = {"batch_size": 4, "num_workers": 0, "device": CPU}
TOP = 10


def make_suite(root, detector, names, n_negatives, **options) -> Suite:
    files = find_benchmarks(root / "annotations", names)
    return Suite.build(
        files,
        n_negatives=dict.fromkeys(files, n_negatives),
        images=make_images(detector, root / "images", 0.0),
        bank=TextBank(detector, policy=options.pop("policy", "drop"), device=CPU),
        **{"top": TOP, **options},
    )


@torch.no_grad()
def alone(detector, file, images, v, n, policy="truncate"):
    """Logits [P, C] and pixel boxes [P, 4] of one vocabulary, with a forward of its own."""
    image = int(file.vocab_image[v])
    width, height = (int(side) for side in file.image_sizes[image])
    pixels = images.preprocessor(load_rgb(images.root / file.image_files[image], expected_size=(width, height)))
    tokens, boxes, _ = detector.encode_images(pixels[None])
    captions = tokenize(detector.tokenizer, file.captions.take(file.vocabulary(v)[: 1 + n]), policy)
    queries = detector.encode_text(captions.input_ids, captions.attention_mask)
    logits = detector.score(tokens, queries[None]).logits[0]
    return logits.numpy(), from_frame(boxes[0], width, height, detector.frame).numpy(), captions.n_over


def compare(detector, suite, predictions, n_list, short="drop"):
    """Top lists of every vocabulary and N against a forward of their own; returns how many were compared."""
    compared = 0
    for name, found in predictions.items():
        file = suite.benchmarks[name].annotations
        place = {key: i for i, key in enumerate(found.keys())}
        for v in range(len(file)):
            key = (int(file.image_ids[file.vocab_image[v]]), int(file.positive_ids[v]))
            for n in n_list:
                enough = file.n_negatives[v] >= n or short == "keep"
                logits, boxes, n_over = alone(detector, file, suite.images, v, n)
                if not enough or (n_over and suite.bank.policy == "drop"):
                    continue
                best = found.at(n, np.array([place[key]]))
                score = logits.max(1)
                order = np.argsort(-score, kind="stable")[:TOP]
                np.testing.assert_allclose(best.scores, score[order], rtol=0, atol=2e-5)
                if np.diff(np.sort(score)[-TOP - 1 :]).min() > 1e-4:  # no near tie: the same patches in the same order
                    np.testing.assert_allclose(best.boxes, boxes[order], rtol=0, atol=1e-2)
                    assert best.columns.tolist() == logits[order].argmax(1).tolist()
                    np.testing.assert_allclose(
                        found.logits[best.rows][:, : logits.shape[1]], logits[order], rtol=0, atol=2e-5
                    )
                compared += 1
    return compared


def counted(detector, monkeypatch) -> list[int]:
    calls: list[int] = []
    original = detector.encode_images

    def counting(pixels):
        calls.append(len(pixels))
        return original(pixels)

    monkeypatch.setattr(detector, "encode_images", counting)
    return calls


@pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
def test_one_pass_equals_one_forward_each(fresh_detector, world, tmp_path, monkeypatch, kind):
    """Rendered world, four benchmarks, three N; as many image forwards as distinct images."""
    detector = fresh_detector(kind)
    suite = make_suite(world, detector, ["hard", "easy", "trivial", "material"], (0, 1, 2), short_vocabularies="keep")
    calls = counted(detector, monkeypatch)
    outcome = suite.predict(detector, tmp_path, **WORK)
    distinct = {
        name
        for b in suite.benchmarks.values()
        for name in b.annotations.image_files.take(np.unique(b.annotations.vocab_image[b.needed]))
    }
    assert sum(calls) == len(distinct) == outcome.counters["image_forwards"]
    assert max(calls) == 4
    vocabularies = sum(len(p) for p in outcome.predictions.values())
    assert outcome.counters["vocabularies"] == vocabularies
    assert compare(detector, suite, outcome.predictions, (0, 1, 2), short="keep") >= 2 * vocabularies


def test_real_images(fresh_detector, coco_mini, tmp_path):
    """Real photographs and captions; vocabularies over the token limit take part at the N that they fit."""
    detector = fresh_detector()
    suite = make_suite(coco_mini, detector, ["easy", "transparency"], (1, 2))
    outcome = suite.predict(detector, tmp_path, **WORK)
    assert compare(detector, suite, outcome.predictions, (1, 2)) >= 8
    for name, predictions in outcome.predictions.items():
        assert len(predictions) == int(suite.benchmarks[name].needed.sum())
        assert predictions.settings["annotations_sha256"] == suite.benchmarks[name].annotations.sha256


def test_stored_features_give_the_same(fresh_detector, world, tmp_path):
    detector = fresh_detector()
    suite = make_suite(world, detector, ["hard"], (2,), short_vocabularies="keep")
    live = suite.predict(detector, tmp_path, **WORK).predictions["hard"]
    features = store(detector, suite.images, **WORK)
    outcome = suite.predict(detector, tmp_path, stored=features, **WORK)
    stored = outcome.predictions["hard"]
    assert (outcome.counters["image_forwards"], outcome.counters["store_hits"]) == (0, outcome.counters["images"])
    assert stored.keys() == live.keys()
    np.testing.assert_allclose(stored.logits, live.logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(stored.boxes, live.boxes, rtol=0, atol=1e-3)


LONG = "A red plastic cup with a blue and a green and a yellow stripe near the top."  # 19 tokens


@pytest.fixture
def long_root(fgovd, write_fgovd, tmp_path):
    """Two images; the second negative of the first vocabulary is over the token limit."""
    from PIL import Image

    fgovd["categories"][2]["name"] = LONG
    write_fgovd(fgovd)
    for name, size in (("val2017/000000000000.jpg", (100, 50)), ("train2017/000000000007.jpg", (64, 64))):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / "images" / name)
    return tmp_path


def test_a_long_caption_leaves_its_vocabulary_at_that_n(fresh_detector, long_root, tmp_path):
    detector = fresh_detector()
    suite = make_suite(long_root, detector, ["hard"], (1, 2), short_vocabularies="keep")
    predictions = suite.predict(detector, tmp_path, **WORK).predictions["hard"]
    benchmark = suite.benchmarks["hard"]
    assert benchmark.lengths[2] > 16
    first = predictions.keys().index((0, 0))
    rows = slice(*predictions.row_offsets[first : first + 2])
    assert np.isfinite(predictions.logits[rows, :2]).all()
    assert np.isneginf(predictions.logits[rows, 2]).all()  # at N = 2 it is not asked
    assert suite.bank.forwards == 5  # of six captions


def test_a_long_caption_is_cut(fresh_detector, long_root, tmp_path):
    detector = fresh_detector()
    suite = make_suite(long_root, detector, ["hard"], (2,), short_vocabularies="keep", policy="truncate")
    predictions = suite.predict(detector, tmp_path, **WORK).predictions
    assert suite.benchmarks["hard"].lengths is None
    assert compare(detector, suite, predictions, (2,), short="keep") == 3
    assert suite.bank.n_over == 1


def test_coarse_classes_come_from_the_same_pass(fresh_detector, world, tmp_path, monkeypatch):
    """The best class of each patch, from the same tokens; published protocol has no suppression."""
    detector = fresh_detector()
    suite = make_suite(world, detector, ["hard"], (1,), short_vocabularies="keep")
    suite.add_coarse(world / "annotations" / "lvis" / "coarse_test.json", protocol="noctowl")
    calls = counted(detector, monkeypatch)
    outcome = suite.predict(detector, tmp_path, **WORK)
    assert sum(calls) == len(suite.images) == 12  # six images of the benchmarks and six coarse ones
    coarse = suite.coarse.annotations
    with torch.no_grad():
        for i, image_id in enumerate(coarse.image_ids.tolist()):
            tokens, _, _ = detector.encode_images(suite.images[int(suite.coarse.image_rows[i])][None])
            logits = detector.score(tokens, suite.coarse.queries[None]).logits[0].numpy()
            own = outcome.coarse.image == image_id
            assert own.sum() == 64  # a detection per patch, fewer than 300
            np.testing.assert_allclose(outcome.coarse.scores[own], np.sort(logits.max(1))[::-1], rtol=0, atol=2e-5)
            order = np.argsort(-logits.max(1), kind="stable")
            same = outcome.coarse.label[own] == coarse.category_ids[logits.argmax(1)[order]]
            assert same.mean() > 0.95  # near ties may change places
