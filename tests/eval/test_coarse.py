"""The two coarse protocols on the miniature with random weights."""

import hashlib
import json

import numpy as np
import pytest
import torch

from noctowl.data.images import Preprocessor
from noctowl.errors import ConfigError, DataError
from noctowl.eval.coarse import Coarse
from noctowl.eval.inference import predict
from noctowl.eval.outcome import Outcome
from noctowl.eval.suite import Suite
from noctowl.features import ImageSet, TextBank, encode
from noctowl.text import CLIP_TEMPLATES, canonical, class_prompt, template_prompts, tokenize
from tests.eval.test_inference import WORK

pytestmark = pytest.mark.lvis
CPU = torch.device("cpu")
LONG = "very long name of a class that nobody would ever give to a thing in a photograph (but might)"


@pytest.fixture
def make(fresh_detector, world):
    """make(protocol, file=..., policy=..., nms_iou=...) -> (detector, bank, images, coarse)"""

    def build(protocol, file=world / "annotations/lvis/coarse_test.json", policy="error", nms_iou=None):
        detector = fresh_detector()
        bank = TextBank(detector, policy=policy, device=CPU)
        images = ImageSet(world / "images", Preprocessor(detector.image_processor))
        return detector, bank, images, Coarse.build(file, protocol=protocol, nms_iou=nms_iou, images=images, bank=bank)

    return build


@pytest.fixture
def renamed(world, tmp_path):
    """The coarse file with other class names: renamed({position: name}) -> path"""

    def write(names, **more):
        data = json.loads((world / "annotations/lvis/coarse_test.json").read_text())
        for position, name in names.items():
            data["categories"][position]["name"] = name
        path = tmp_path / "renamed.json"
        path.write_text(json.dumps(data | more))
        return path

    return write


def test_prompts():
    assert len(CLIP_TEMPLATES) == 7
    assert template_prompts("Bow_(weapon)") == [
        "itap of a bow weapon",
        "a bad photo of the bow weapon",
        "a origami bow weapon",
        "a photo of the large bow weapon",
        "a bow weapon in a video game",
        "art of the bow weapon",
        "a photo of the small bow weapon",
    ]
    assert canonical(" First--aid_kit,  N° 7! ") == "first-aid kit n 7"
    assert canonical("No #1's hat") == "no 1 s hat"
    assert class_prompt("Bow_(weapon)") == "a bow weapon"


def one_image(detector, images, row):
    tokens, boxes, _ = detector.encode_images(images[row][None])
    return tokens, boxes[0].numpy()


def test_owl_averages_logits_and_takes_the_best_of_all_pairs(make):
    """As published: every template scored for itself, the logits averaged; here by hand, one template at a time."""
    detector, _, images, coarse = make("owl")
    names = list(coarse.annotations.names)
    with torch.no_grad():
        tokens, boxes = one_image(detector, images, int(coarse.image_rows[0]))
        of_template = []
        for template in CLIP_TEMPLATES:
            text = tokenize(detector.tokenizer, [canonical(template.format(name)) for name in names])
            queries = detector.encode_text(text.input_ids, text.attention_mask)
            of_template.append(detector.score(tokens, queries[None]).logits[0])
        logits = torch.stack(of_template).mean(0)  # [P, K]
        coarse.top = logits.numel()
        found = coarse.detect(detector, tokens, boxes, 5)
    assert len(found.scores) == logits.numel() == 64 * len(names)
    np.testing.assert_allclose(found.scores, logits.flatten().sort(descending=True).values, rtol=0, atol=2e-5)
    assert (coarse.strength < 1).all()  # so averaged embeddings at unit length would be another score
    column = {k: i for i, k in enumerate(coarse.annotations.category_ids.tolist())}
    patch = {tuple(box): p for p, box in enumerate(boxes.tolist())}
    for box, label, score in zip(found.boxes.tolist(), found.label.tolist(), found.scores.tolist()):
        assert score == pytest.approx(logits[patch[tuple(box)], column[label]].item(), abs=2e-5)


def test_three_hundred_of_each_image_are_kept(make):
    detector, bank, images, coarse = make("owl")
    kept = []
    detect = coarse.detect
    coarse.detect = lambda *args: kept.append(detect(*args)) or kept[-1]
    features = encode(detector, images, range(len(images)), batch_size=4, num_workers=0, device=CPU)
    outcome = predict(
        detector, {}, features, images=images, embeddings=bank.embeddings, top=1, settings={"base": "x"}, coarse=coarse
    )
    assert 64 * len(coarse.annotations.category_ids) > 300
    assert [len(part.scores) for part in kept] == [300] * len(images)
    for part in kept:
        assert all(array.base is None for array in vars(part).values())  # no view keeps an image's [P, K] alive
    assert len(outcome.coarse.scores) == 300 * len(images)
    assert (np.diff(outcome.coarse.scores.reshape(-1, 300), axis=1) <= 0).all()
    assert outcome.coarse_settings["protocol"] == "owl"
    assert outcome.coarse_settings["base"] == "x"


def test_every_prompt_is_encoded_once(make, monkeypatch):
    _, bank, images, coarse = make("owl")
    k = len(coarse.annotations.category_ids)
    assert bank.forwards == 7 * k
    path = coarse.annotations.path
    again = Coarse.build(path, protocol="owl", nms_iou=None, images=images, bank=bank)
    assert bank.forwards == 7 * k
    torch.testing.assert_close(again.queries, coarse.queries, rtol=0, atol=0)
    assert make("noctowl")[1].forwards == k


def test_settings_say_what_was_asked(make):
    _, _, _, coarse = make("noctowl", nms_iou=0.5)
    names = list(coarse.annotations.names)
    assert coarse.settings["nms_iou"] == 0.5
    assert coarse.settings["prompts"] == len(names)
    assert coarse.settings["prompts_sha256"] == hashlib.sha256("\n".join(map(class_prompt, names)).encode()).hexdigest()
    assert coarse.settings["sha256"] == hashlib.sha256(coarse.annotations.path.read_bytes()).hexdigest()
    assert coarse.settings["processor"]["pad_value"] == 0.0
    owl = make("owl", nms_iou=0.5)[3]
    assert (owl.settings["nms_iou"], owl.settings["top"], owl.settings["prompts"]) == (None, 300, 7 * len(names))
    with pytest.raises(ConfigError, match="coarse_protocol: found 'clip'; allowed are 'noctowl' and 'owl'"):
        make("clip")


@pytest.mark.parametrize("policy", ["drop", "error", "truncate"])
def test_long_class_prompts_are_cut_and_counted_under_every_policy(make, renamed, policy):
    detector, bank, _, coarse = make("noctowl", renamed({0: LONG}), policy)
    assert coarse.settings["prompts_over_limit"] == 1
    assert bank.n_over == 1
    text = tokenize(detector.tokenizer, [class_prompt(LONG)], "truncate")
    with torch.no_grad():
        torch.testing.assert_close(coarse.queries[:1], detector.encode_text(text.input_ids, text.attention_mask))


def test_a_caption_that_was_dropped_can_be_a_prompt(make):
    _, bank, _, _ = make("noctowl", policy="drop")
    first = bank.rows([LONG])[0]
    assert not bank.embeddings[first].any()
    second = bank.prompt_rows([LONG])[0]
    assert bank.embeddings[second].norm() == pytest.approx(1)
    assert bank.n_over == 1
    assert bank.lengths[bank.rows([LONG])[0]] > 16  # the token rule still sees its length


def test_classes_go_by_id(make, renamed, world):
    """Shuffled categories and an id of 0: the same detections."""
    data = json.loads((world / "annotations/lvis/coarse_test.json").read_text())
    detector, _, images, coarse = make("owl")
    _, _, _, other = make("owl", renamed({}, categories=data["categories"][::-1]))
    with torch.no_grad():
        tokens, boxes = one_image(detector, images, int(coarse.image_rows[0]))
        a, b = (c.detect(detector, tokens, boxes, 5) for c in (coarse, other))
    assert (a.label == b.label).mean() > 0.99  # near ties may change places
    np.testing.assert_allclose(a.scores, b.scores, rtol=0, atol=1e-5)
    first = min(data["categories"], key=lambda c: c["id"])["id"]
    assert first in a.label.tolist()


def test_saved_detections_keep_their_protocol(make, world, tmp_path):
    detector, bank, images, _ = make("owl")
    suite = Suite({}, images, bank, top=100)
    suite.add_coarse(world / "annotations/lvis/coarse_test.json", protocol="owl")
    outcome = suite.predict(detector, tmp_path, **WORK)
    outcome.save(tmp_path)
    loaded = Outcome.load(tmp_path)  # a folder with coarse detections alone
    assert loaded.predictions == {}
    assert loaded.coarse_settings == outcome.coarse_settings
    np.testing.assert_array_equal(loaded.coarse.scores, outcome.coarse.scores)
    conventions = {"ground_truth": "unmasked"}
    assert suite.score(loaded, conventions)["metrics"] == suite.score(outcome, conventions)["metrics"]
    loaded.coarse_settings["sha256"] = "of another file"
    with pytest.raises(DataError, match=r"another version of .*coarse_test\.json"):
        suite.score(loaded, conventions)
    np.savez(tmp_path / "coarse.npz", image=np.zeros(1))
    with pytest.raises(DataError, match=r"coarse\.npz: no coarse detections"):
        Outcome.load(tmp_path)


def test_lvis_alone(command, small):
    """benchmark=lvis: no FG-OVD benchmark, AP by the protocol of OWL's authors; scored again from what was saved."""
    data = [o for o in small if o.startswith(("model", "data."))] + ["data=fgovd", "benchmark=lvis"]
    found = command("evaluate", *data, "data.coarse_file=lvis/coarse_test.json")
    assert found.code == 0, found.err
    metrics = found.results["metrics"]
    assert {"lvis/ap", "lvis/ap_50"} <= metrics.keys()
    assert all(key.startswith("lvis/") for key in metrics)
    assert found.results["settings"]["coarse"]["protocol"] == "owl"
    assert "LVIS, protocol owl" in found.out
    again = command("evaluate", f"predictions={found.folder}", "benchmark=lvis", "benchmark.names=null")
    assert again.code == 0, again.err
    assert again.results["metrics"] == metrics
    assert again.results["settings"]["coarse"]["protocol"] == "owl"
    nothing = command("evaluate", *data)
    assert nothing.code == 2
    assert "data.coarse_file" in nothing.err
