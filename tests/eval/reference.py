"""The public COCO scorers run on the same flat arrays, for comparison."""

import contextlib
import io

import numpy as np
from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from noctowl.eval.ap import BoxScores, Detections, GroundTruth


def coco_scores(det: Detections, gt: GroundTruth, *, faster: bool = False) -> tuple[np.ndarray, np.ndarray, dict]:
    """AP [A, T, K] and recall [M, A, T, K] with NaN for -1, and the class ids."""
    coco_class, eval_class = (FasterCOCO, COCOeval_faster) if faster else (COCO, COCOeval)
    classes = np.unique(np.append(gt.label, det.label))
    images = np.unique(np.append(gt.image, det.image))
    crowd = np.zeros(len(gt.label), dtype=bool) if gt.crowd is None else gt.crowd
    head = {"images": [{"id": int(i)} for i in images], "categories": [{"id": int(k)} for k in classes]}
    truth = [
        _annotation(n + 1, *row) | {"area": float(area), "iscrowd": int(c)}
        for n, (*row, area, c) in enumerate(zip(gt.image, gt.label, gt.boxes, gt.area, crowd))
    ]
    found = [
        _annotation(n + 1, *row) | {"score": float(score), "iscrowd": 0}
        for n, (*row, score) in enumerate(zip(det.image, det.label, det.boxes, det.scores))
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        bundles = []
        for annotations in (truth, found):
            coco = coco_class()
            coco.dataset = head | {"annotations": annotations, "info": {}}
            coco.createIndex()
            bundles.append(coco)
        run = eval_class(*bundles, "bbox")
        run.evaluate()
        run.accumulate()
    precision = run.eval["precision"].transpose(3, 4, 0, 2, 1)[:, -1]  # [T, R, K, A, M] -> [A, T, K, R]
    recall = run.eval["recall"].transpose(3, 2, 0, 1)  # [T, K, A, M] -> [M, A, T, K]
    ap = np.where((precision > -1).any(-1), precision.mean(-1), np.nan)
    return ap, np.where(recall > -1, recall, np.nan), {int(k): n for n, k in enumerate(classes)}


def assert_equal_scores(ours: BoxScores, reference: tuple[np.ndarray, np.ndarray, dict]) -> None:
    ap, recall, place = reference
    columns = [place[int(k)] for k in ours.classes]
    np.testing.assert_allclose(ours.ap, ap[..., columns], rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.recall, recall[..., columns], rtol=0, atol=1e-12)
    others = [n for k, n in place.items() if k not in set(ours.classes.tolist())]
    assert np.isnan(ap[..., others]).all()


def _annotation(number, image, label, box) -> dict:
    x0, y0, x1, y1 = (float(v) for v in box)
    return {
        "id": number,
        "image_id": int(image),
        "category_id": int(label),
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
    }
