"""Assignment against hand-made scenes, brute force over permutations and the published implementation's targets."""

from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file
from torchvision import ops

from noctowl.errors import DataError, ModelError
from noctowl.matcher import match

GRID = torch.tensor(  # four patches, one in each quarter of the square
    [[0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 1.0, 0.5], [0.0, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0]]
)


def random_problem(n_images: int, n_patches: int, n_columns: int, n_objects: int, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def corners(n):
        raw = torch.rand(n_images, n, 2, 2, generator=generator).sort(dim=2).values
        return raw.reshape(n_images, n, 4)

    sims = torch.rand(n_images, n_patches, n_columns, generator=generator) * 2 - 1
    return corners(n_patches), sims, corners(n_objects)


def cost_matrix(pred_boxes, similarities, gt_boxes):
    """[G, P] for one image, straight from the definition."""
    l1 = (gt_boxes[:, None] - pred_boxes[None]).abs().sum(-1)
    probability = similarities.exp()[:, 0] / similarities.exp().sum(1)
    return l1 - probability[None] - ops.generalized_box_iou(gt_boxes, pred_boxes)


def test_one_object_takes_the_patch_that_covers_it():
    sims = torch.zeros(1, 4, 3)
    found = match(pred_boxes=GRID[None], similarities=sims, gt_boxes=torch.tensor([[[0.5, 0.5, 0.9, 1.0]]]))
    assert found.matched_patch.tolist() == [[3]]
    assert found.positive.tolist() == [[False, False, False, True]]


def test_similarity_decides_between_equal_boxes():
    pred = GRID[[0, 0, 0, 3]][None]
    sims = torch.tensor([[[0.1, 0.1], [0.3, 0.1], [0.3, 0.9], [0.9, 0.0]]])
    found = match(pred_boxes=pred, similarities=sims, gt_boxes=GRID[None, :1])
    assert found.matched_patch.tolist() == [[1]]  # softmax of (.3, .1) is the largest among the three equal boxes
    assert found.positive.tolist() == [[True, True, True, False]]  # the equal boxes are foreground too


def test_spread_is_strictly_above_the_threshold():
    pred = torch.tensor([[[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.86], [0.0, 0.0, 1.0, 0.84]]])
    found = match(pred_boxes=pred, similarities=torch.zeros(1, 3, 2), gt_boxes=torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]))
    assert found.positive.tolist() == [[True, True, False]]


def test_spread_measures_against_the_prediction_not_the_object():
    # the object's box equals patch 1's neighbour only through the prediction that is matched
    gt = torch.tensor([[[0.0, 0.0, 1.0, 0.8]]])
    pred = torch.tensor([[[0.0, 0.0, 1.0, 0.9], [0.0, 0.0, 1.0, 1.0], [0.4, 0.4, 0.6, 0.6]]])
    found = match(pred_boxes=pred, similarities=torch.zeros(1, 3, 2), gt_boxes=gt)
    assert found.matched_patch.tolist() == [[0]]
    assert found.positive.tolist() == [[True, True, False]]  # IoU .9 with the prediction, .8 with the object


@pytest.mark.parametrize("seed", range(8))
def test_several_objects_equal_brute_force(seed):
    pred, sims, gt = random_problem(3, 7, 4, 3, seed)
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    found = match(pred_boxes=pred, similarities=sims, gt_boxes=gt, gt_mask=mask)
    for b in range(3):
        objects = mask[b].nonzero().flatten()
        cost = cost_matrix(pred[b], sims[b], gt[b][objects])
        best = min(
            permutations(range(7), len(objects)), key=lambda patches: sum(cost[g, p] for g, p in enumerate(patches))
        )
        assert found.matched_patch[b][objects].tolist() == list(best)
        assert (found.matched_patch[b][~mask[b]] == -1).all()
        overlap = ops.box_iou(pred[b][list(best)], pred[b]) > 0.85
        assert found.positive[b].tolist() == overlap.any(0).tolist()


def test_two_objects_never_share_a_patch():
    twice = GRID[:1].repeat(2, 1)[None]
    found = match(pred_boxes=GRID[None], similarities=torch.zeros(1, 4, 2), gt_boxes=twice)
    assert found.matched_patch[0].unique().numel() == 2


def test_padded_query_columns_do_not_change_the_match():
    pred, sims, gt = random_problem(2, 9, 4, 1, 0)
    plain = match(pred_boxes=pred, similarities=sims, gt_boxes=gt)
    padded = torch.cat((sims, torch.rand(2, 9, 3) * 5), dim=2)
    mask = torch.tensor([[True] * 4 + [False] * 3] * 2)
    masked = match(pred_boxes=pred, similarities=padded, gt_boxes=gt, query_mask=mask)
    assert torch.equal(plain.matched_patch, masked.matched_patch)
    assert torch.equal(plain.positive, masked.positive)


def test_padding_objects_may_hold_anything_and_match_nothing():
    pred, sims, gt = random_problem(2, 9, 4, 2, 1)
    gt[0, 1], gt[1] = float("nan"), 0.0
    mask = torch.tensor([[True, False], [False, False]])
    found = match(pred_boxes=pred, similarities=sims, gt_boxes=gt, gt_mask=mask)
    assert found.matched_patch[0, 1] == -1
    assert found.matched_patch[1].tolist() == [-1, -1]
    assert not found.positive[1].any()


def test_predictions_without_area_are_legal():
    pred = GRID.clone()
    pred[3, 2:] = pred[3, :2]
    found = match(pred_boxes=pred[None], similarities=torch.zeros(1, 4, 2), gt_boxes=GRID[None, 3:])
    assert found.positive.sum() == 1  # matched itself, whatever its overlap
    alone = match(pred_boxes=pred[None, 3:], similarities=torch.zeros(1, 1, 2), gt_boxes=GRID[None, 3:])
    assert alone.positive.tolist() == [[True]]


@pytest.mark.parametrize("box", [[0.5, 0.5, 0.5, 0.9], [0.6, 0.1, 0.2, 0.9], [0.1, float("nan"), 0.2, 0.9]])
def test_bad_objects_are_errors(box):
    gt = torch.stack((GRID[:1], torch.tensor([box])))
    with pytest.raises(DataError, match=r"gt_boxes\[1, 0\].*x1 < x2"):
        match(pred_boxes=GRID.expand(2, 4, 4), similarities=torch.zeros(2, 4, 2), gt_boxes=gt)


def test_predictions_that_are_not_finite_are_errors():
    sims = torch.zeros(1, 4, 2)
    sims[0, 2, 1] = float("nan")
    with pytest.raises(ModelError, match=r"patch 2 of image 0.*NaN"):
        match(pred_boxes=GRID[None], similarities=sims, gt_boxes=GRID[None, :1])
    broken = GRID.clone()
    broken[1, 0] = float("inf")
    with pytest.raises(ModelError, match="patch 1 of image 0"):
        match(pred_boxes=broken[None], similarities=torch.zeros(1, 4, 2), gt_boxes=GRID[None, :1])


def test_more_objects_than_patches_is_an_error():
    with pytest.raises(DataError, match=r"5 objects.*4 patches"):
        match(pred_boxes=GRID[None], similarities=torch.zeros(1, 4, 2), gt_boxes=GRID[[0, 1, 2, 3, 0]][None])


def test_half_precision_inputs_match_like_their_fp32_values():
    pred, sims, gt = (x.bfloat16() for x in random_problem(2, 9, 4, 2, 5))
    half = match(pred_boxes=pred, similarities=sims, gt_boxes=gt)
    full = match(pred_boxes=pred.float(), similarities=sims.float(), gt_boxes=gt.float())
    assert torch.equal(half.matched_patch, full.matched_patch)


@pytest.mark.golden
@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_targets_of_the_published_implementation(shared, case):
    tensors = load_file(shared / "golden" / "loss_golden.safetensors")
    pred, sims, gt = (tensors[f"{case}.in.{name}"] for name in ("pred_boxes", "sims", "gt_boxes"))
    found = match(pred_boxes=pred, similarities=sims, gt_boxes=gt)
    assert torch.equal(found.matched_patch, tensors[f"{case}.matcher.pred_idx"])
    matched_only = torch.zeros_like(found.positive).scatter_(1, found.matched_patch, True)
    assert torch.equal(matched_only, tensors[f"{case}.matcher.target_classes"] == 0)
    assert torch.equal(found.positive, tensors[f"{case}.target_classes_spread"] == 0)
    assert found.positive.sum() > matched_only.sum()
