"""Training items: boxes in the model's frame, padding with masks, the loader's order, errors from worker processes."""

import numpy as np
import pytest
import torch
from PIL import Image

from noctowl.assembly import make_images
from noctowl.data.batch import collate
from noctowl.data.datamodule import DataModule, TrainingSet
from noctowl.data.fgovd import read_fgovd
from noctowl.data.images import ImageError
from noctowl.data.loading import make_loader, usable_cpus
from noctowl.features import TextBank
from noctowl.model import ImageFeatures

CPU = torch.device("cpu")


@pytest.fixture
def root(fgovd, write_fgovd, tmp_path):
    """The small hand-made file with its two images."""
    write_fgovd(fgovd)
    for name, size in (("val2017/000000000000.jpg", (100, 50)), ("train2017/000000000007.jpg", (64, 64))):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / "images" / name)
    return tmp_path


def make_set(root, detector, *, kept=(True, True, True), n_negatives=2) -> TrainingSet:
    annotations = read_fgovd(root / "annotations" / "benchmarks" / "1_attributes.json")
    images = make_images(detector, root / "images", 0.0)
    bank = TextBank(detector, policy="error", device=CPU)
    rows = bank.caption_rows(annotations)
    image_rows = images.add(annotations.image_files, annotations.image_sizes)
    return TrainingSet(
        annotations, np.array(kept), n_negatives, images, image_rows, bank.embeddings, rows, detector.frame
    )


def test_items_in_the_padded_frame(fresh_detector, root):
    dataset = make_set(root, fresh_detector("owlv2"))
    first, second, third = (dataset[i] for i in range(3))
    assert [item.key for item in (first, second, third)] == [(0, 0), (7, 30), (0, 50)]
    wanted = torch.tensor([[0.10, 0.05, 0.30, 0.35], [0.505, 0.0, 0.605, 0.10]])  # both sides by the longer one, 100
    torch.testing.assert_close(first.gt_boxes, wanted)
    torch.testing.assert_close(second.gt_boxes, torch.tensor([[0.0, 0.0, 1.0, 1.0]]))
    assert [len(item.queries) for item in (first, second, third)] == [3, 2, 1]
    bank = TextBank(fresh_detector("owlv2"), policy="error", device=CPU)
    bank.rows(["A red cup.", "A blue cup.", "A green cup."])
    torch.testing.assert_close(first.queries, bank.embeddings, rtol=0, atol=1e-6)
    assert first.pixel_values.shape == (3, 96, 96)
    assert first.tokens is None


def test_items_in_the_warped_frame(fresh_detector, root):
    first = make_set(root, fresh_detector("owlvit"))[0]
    wanted = torch.tensor([[0.10, 0.10, 0.30, 0.70], [0.505, 0.0, 0.605, 0.20]])  # by width 100 and height 50
    torch.testing.assert_close(first.gt_boxes, wanted)


def test_only_kept_vocabularies_and_the_first_negatives(fresh_detector, root):
    dataset = make_set(root, fresh_detector(), kept=(True, False, True), n_negatives=1)
    assert [item.key for item in (dataset[0], dataset[1])] == [(0, 0), (0, 50)]
    assert len(dataset) == 2
    assert len(dataset[0].queries) == 2


def test_padding_and_its_masks(fresh_detector, root):
    dataset = make_set(root, fresh_detector())
    batch = collate([dataset[i] for i in range(3)])
    assert batch.query_mask.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert batch.gt_mask.tolist() == [[True, True], [True, False], [True, False]]
    assert batch.queries.shape == (3, 3, 96)
    assert batch.gt_boxes.shape == (3, 2, 4)
    assert batch.queries[~batch.query_mask].abs().max() == 0
    assert batch.gt_boxes[~batch.gt_mask].abs().max() == 0
    for b in range(3):
        assert torch.equal(batch.queries[b][batch.query_mask[b]], dataset[b].queries)
        assert torch.equal(batch.gt_boxes[b][batch.gt_mask[b]], dataset[b].gt_boxes)
    assert batch.pixel_values.shape == (3, 3, 96, 96)
    assert batch.tokens is None
    assert len(batch) == 3


def test_stored_features_take_the_place_of_pixels(fresh_detector, root):
    dataset = make_set(root, fresh_detector())
    dataset.stored = ImageFeatures(torch.arange(2.0).view(2, 1, 1).expand(2, 64, 160), torch.zeros(2, 64, 4), None)
    batch = collate([dataset[i] for i in range(3)])
    assert batch.pixel_values is None
    assert batch.tokens[:, 0, 0].tolist() == [0.0, 1.0, 0.0]  # the rows of the images, not of the vocabularies


def order(dataset: TrainingSet, seed: int, epochs: int = 2) -> list[list[tuple[int, int]]]:
    loader = DataModule(dataset, batch_size=2, num_workers=0, seed=seed).train_dataloader()
    found = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # as Lightning does
        found.append([key for batch in loader for key in batch.keys])
    return found


def test_order_hangs_on_the_seed_alone(fresh_detector, root):
    dataset = make_set(root, fresh_detector())
    torch.manual_seed(1)
    first = order(dataset, 7, 4)
    torch.manual_seed(2)
    assert order(dataset, 7, 4) == first
    assert all(sorted(epoch) == [(0, 0), (0, 50), (7, 30)] for epoch in first)  # the incomplete batch is kept
    assert len({tuple(epoch) for epoch in first}) > 1
    assert len({tuple(map(tuple, order(dataset, seed, 4))) for seed in range(6)}) > 1


@pytest.mark.faults
@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_image_is_told_as_it_is(fresh_detector, root, workers):
    """Also from a worker process, where torch would raise a RuntimeError with a traceback for a message."""
    (root / "images" / "train2017" / "000000000007.jpg").unlink()
    dataset = make_set(root, fresh_detector())
    loader = DataModule(dataset, batch_size=3, num_workers=workers, seed=0).train_dataloader()
    with pytest.raises(ImageError) as error:
        list(loader)
    path = root / "images" / "train2017" / "000000000007.jpg"
    assert str(error.value).startswith(f"{path}: the image file is missing.")
    assert error.value.kind == "missing"


def test_no_more_workers_than_cpus():
    assert make_loader([1, 2], num_workers=100_000).num_workers == usable_cpus() >= 1
    assert make_loader([1, 2]).num_workers == 0
