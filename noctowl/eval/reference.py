"""The public COCO scorers on the arrays of `ap.py`: slow, independent, for checks of our own figures.

Legend as in ap.py: A area ranges, T IoU thresholds, K classes, M detection limits, R recall points.
"""

import contextlib
import importlib
import io
from typing import Literal

import numpy as np
from numpy import ndarray

from noctowl.errors import ConfigError
from noctowl.eval.ap import BoxScores, Detections, GroundTruth

Backend = Literal["pycocotools", "faster_coco_eval"]
MODULES = {
    "pycocotools": ("pycocotools.coco", "pycocotools.cocoeval", "COCOeval"),
    "faster_coco_eval": ("faster_coco_eval", "faster_coco_eval", "COCOeval_faster"),
}


def reference_scores(
    *, detections: Detections, ground_truth: GroundTruth, backend: Backend = "pycocotools"
) -> BoxScores:
    """What `score_boxes` gives, by a public scorer. Annotations are numbered from 1, as that code takes id 0 for none.

    Raises ConfigError where faster_coco_eval is asked for and not installed.
    """
    det, gt = detections, ground_truth
    data_module, eval_module, evaluator = MODULES[backend]
    try:
        coco_class = importlib.import_module(data_module).COCO
        eval_class = getattr(importlib.import_module(eval_module), evaluator)
    except ImportError as error:
        raise ConfigError(f"backend {backend} is not installed ({error}). Install it, or use pycocotools.") from error
    classes = np.unique(gt.label)
    known = np.isin(det.label, classes)
    crowd = np.zeros(len(gt.label), dtype=bool) if gt.crowd is None else gt.crowd
    head = {
        "info": {},
        "images": [{"id": i} for i in np.union1d(gt.image, det.image).tolist()],
        "categories": [{"id": k} for k in classes.tolist()],
    }
    truth = _annotations(gt.image, gt.label, gt.boxes, area=gt.area, iscrowd=crowd.astype(int))
    found = _annotations(det.image[known], det.label[known], det.boxes[known], score=det.scores[known])
    with contextlib.redirect_stdout(io.StringIO()):
        sets = []
        for annotations in (truth, found):
            coco = coco_class()
            coco.dataset = head | {"annotations": annotations}
            coco.createIndex()
            sets.append(coco)
        run = eval_class(*sets, "bbox")
        run.evaluate()
        run.accumulate()
    precision = np.asarray(run.eval["precision"])[..., -1].transpose(3, 0, 2, 1)  # [T, R, K, A] -> [A, T, K, R]
    recall = np.asarray(run.eval["recall"]).transpose(3, 2, 0, 1)  # [T, K, A, M] -> [M, A, T, K]
    return BoxScores(
        classes=classes,
        iou=np.asarray(run.params.iouThrs),
        limits=tuple(run.params.maxDets),
        ap=np.where((precision > -1).any(-1), precision.mean(-1), np.nan),
        recall=np.where(recall > -1, recall, np.nan),
    )


def _annotations(image: ndarray, label: ndarray, boxes: ndarray, **more: ndarray) -> list[dict]:
    corner = boxes[:, :2].astype(np.float64)
    side = boxes[:, 2:].astype(np.float64) - corner
    columns = {"image_id": image, "category_id": label, "bbox": np.concatenate([corner, side], 1)}
    columns |= {"area": side.prod(1), "iscrowd": np.zeros(len(image), int)} | more
    rows = zip(*(column.tolist() for column in columns.values()))
    return [{"id": number, **dict(zip(columns, row))} for number, row in enumerate(rows, 1)]
