"""Box formats, frames and overlaps against hand-computed numbers, torchvision and brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import ops

from noctowl import boxes

SIZES = st.integers(1, 4000)
UNIT = st.floats(0, 1, width=32)


def random_boxes(n: int, seed: int) -> torch.Tensor:
    corners = torch.rand(n, 2, 2, generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
    return corners.reshape(n, 4)


@pytest.mark.parametrize("frame", ["padded", "warped"])
def test_box_at_the_right_edge_of_a_wide_image_survives(frame):
    pixels = torch.tensor([[600.0, 100.0, 640.0, 320.0]])
    relative = boxes.to_frame(pixels, 640, 320, frame)
    expected = {"padded": [0.9375, 0.15625, 1.0, 0.5], "warped": [0.9375, 0.3125, 1.0, 1.0]}[frame]
    assert relative[0].tolist() == expected
    head = boxes.xyxy_to_cxcywh(relative)  # what the box head would have to predict
    decoded = boxes.from_frame(boxes.cxcywh_to_xyxy(head), 640, 320, frame)
    torch.testing.assert_close(decoded, pixels, rtol=0, atol=1e-4)


def test_tall_image_is_padded_at_the_right():
    relative = boxes.to_frame(torch.tensor([[0.0, 0.0, 100.0, 400.0]]), 100, 400, "padded")
    assert relative[0].tolist() == [0.0, 0.0, 0.25, 1.0]


def test_clip_is_to_the_image_not_to_the_square():
    outside = torch.tensor([[-0.1, 0.2, 1.2, 0.9]])
    clipped = boxes.from_frame(outside, 640, 320, "padded", clip=True)
    assert clipped[0].tolist() == [0.0, 128.0, 640.0, 320.0]
    raw = boxes.from_frame(outside, 640, 320, "padded")
    torch.testing.assert_close(raw, torch.tensor([[-64.0, 128.0, 768.0, 576.0]]))


@given(
    st.lists(st.tuples(UNIT, UNIT, UNIT, UNIT), min_size=1, max_size=5),
    SIZES,
    SIZES,
    st.sampled_from(["padded", "warped"]),
)
@settings(max_examples=60, deadline=None)
def test_frames_and_formats_round_trip(rows, width, height, frame):
    corners = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2, 2).sort(dim=1).values.reshape(-1, 4)
    pixels = corners * torch.tensor([width, height, width, height])
    relative = boxes.to_frame(pixels, width, height, frame)
    assert relative.min() >= 0
    assert relative.max() <= 1 + 1e-12
    torch.testing.assert_close(boxes.from_frame(relative, width, height, frame), pixels, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(boxes.cxcywh_to_xyxy(boxes.xyxy_to_cxcywh(relative)), relative, rtol=0, atol=1e-12)


def test_iou_and_giou_by_hand():
    a = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    b = torch.tensor([[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0], [4.0, 0.0, 6.0, 2.0]])
    torch.testing.assert_close(boxes.iou(a, b), torch.tensor([[1 / 7, 1.0, 0.0]]))
    torch.testing.assert_close(boxes.generalized_iou(a, b), torch.tensor([[1 / 7 - 2 / 9, 1.0, -4 / 12]]))


def test_batches_equal_single_problems():
    a, b = random_boxes(10, 0).reshape(2, 5, 4), random_boxes(6, 1).reshape(2, 3, 4)
    for ours, theirs in ((boxes.iou, ops.box_iou), (boxes.generalized_iou, ops.generalized_box_iou)):
        for i in range(2):
            assert torch.equal(ours(a, b)[i], theirs(a[i], b[i]))


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_overlap_bounds_with_degenerate_boxes(seed):
    a, b = random_boxes(6, seed), random_boxes(6, seed + 1)
    a[0, 2], a[1, 2:] = a[0, 0], a[1, :2]  # a line and a point
    b[0, 2:] = b[0, :2]
    b[1] = a[1]
    overlap, generalized = boxes.iou(a, b), boxes.generalized_iou(a, b)
    assert ((overlap >= 0) & (overlap <= 1 + 1e-6)).all()
    assert ((generalized >= -1 - 1e-6) & (generalized <= overlap + 1e-6)).all()
    assert overlap[1, 1] == 0
    assert generalized[1, 1] == -1


def test_nan_coordinates_stay_visible():
    broken = torch.tensor([[0.0, 0.0, float("nan"), 1.0]])
    assert boxes.iou(broken, random_boxes(1, 0)).isnan().all()


def test_check_names_the_first_bad_box():
    stack = random_boxes(4, 0).reshape(2, 2, 4)
    boxes.check_boxes(stack, "gt_boxes")
    stack[1, 0] = torch.tensor([0.5, 0.0, 0.25, 1.0])
    with pytest.raises(ValueError, match=r"gt_boxes\[1, 0\] = \[0.5, 0.0, 0.25, 1.0\].*x1 <= x2"):
        boxes.check_boxes(stack, "gt_boxes")


def test_nms_is_greedy_and_refuses_nan():
    stack = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 9.0], [20.0, 0.0, 30.0, 10.0], [5.0, 5.0, 5.0, 5.0]])
    assert boxes.nms(stack, torch.tensor([0.5, 0.9, 0.7, 0.1]), 0.5).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="NaN"):
        boxes.nms(stack, torch.tensor([0.5, float("nan"), 0.7, 0.1]), 0.5)


@pytest.mark.parametrize(
    ("size", "frame", "words"), [((0, 5), "padded", "positive"), ((4, 5), "square", "padded, warped")]
)
def test_bad_frames_are_errors(size, frame, words):
    with pytest.raises(ValueError, match=words):
        boxes.frame_scale(*size, frame)
