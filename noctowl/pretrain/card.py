"""What the pretrained miniature can do, measured by the project's own evaluation, and its model card.

`python -m noctowl.pretrain.card checkpoints/tiny --also FOLDER` writes the card again, with the figures of other seeds.
"""

import argparse
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Owlv2Processor

from noctowl.architectures import image_processor
from noctowl.data.files import BENCHMARKS
from noctowl.data.images import Preprocessor
from noctowl.data.synthetic import MANIFEST
from noctowl.data.world import PRETRAIN
from noctowl.eval.suite import Suite, default_negatives
from noctowl.features import ImageSet, TextBank
from noctowl.model import OwlDetector
from noctowl.pretrain.model import Pretrainee

PROVENANCE = "provenance.json"
COARSE_NMS_IOU = 0.5
CARD = """---
library_name: transformers
license: apache-2.0
tags: [object-detection, open-vocabulary, synthetic]
---
# NoctOWL's pretrained miniature

An OWLv2 of {parameters:.1f} M parameters (96 px, 8×8 patches, vision 160×3, text 96×2) that was trained from nothing on
rendered scenes (`noctowl/data/world.py`). It stands where a real OWLv2 stands before NoctOWL: it knows classes, and of
attributes a little. It exists to show the method's effects in seconds. **It says nothing about real images.**

```python
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

model, processor = (c.from_pretrained("{folder}") for c in (AutoModelForZeroShotObjectDetection, AutoProcessor))
```

## Recipe
`python -m noctowl.pretrain --out {folder} --seed {seed}`: {minutes} CPU minutes on one thread, no download.
1. {steps} steps of {batch} freshly rendered images ({images} in all). A projection that is thrown away learns
   sentences against sentences with one attribute changed, attribute words and class names; the class head learns class
   names only; boxes, objectness and, from the first layer, silhouettes beside it. The moving average of the weights is
   kept.
2. Tokens frozen, class head anew on {head_images} images: class names, and captions against captions of things of
   *other classes*.

**The knob.** The weight of those captions decides how much the head knows of attributes. The rule: the first of
{weights} with a validation rank-1 (Hard, N = 5, chance .167) of {wanted} or more. Tried: {tried}.
The thrown-away projection, which was taught every attribute and is one linear layer on the same tokens as the class
head, has {projection:.3f} at the middle patch of the same things (target: .9): what fine-tuning can reach.

## Figures
Synthetic data, seed 0, test files ({n_test} + {n_test} images); the knob was chosen on validation images. mAP, and in
brackets the share of objects whose true caption is ranked first; N = 5, attribute benchmarks N = 2. Coarse: LVIS
metric, top class per patch, NMS at IoU {nms} (published LVIS figures use none).

{table}

Each row is a whole pretraining from another seed ({rows} here); only the first is shipped. "Unseen" are the Hard
objects whose combination of class and colour no training shows.

## Limits
- 16 classes, 12 colours, 6 patterns, 6 materials, 3 transparencies; flat silhouettes on grey. Negatives are
  exchangeable with positives by construction, unlike those of FG-OVD.
- Each rare class is {rare_share:.1f} % of the things in pretraining, each common one {common_share:.1f} %, each
  frequent one {frequent_share:.1f} %.
- Other machines give other last digits; `provenance.json` holds versions, settings and the sha256 of every file.
{notes}"""


def save_detector(model: Pretrainee, out: Path) -> None:
    """A transformers folder: config, safetensors, image processor and tokenizer, for Auto classes."""
    out.mkdir(parents=True, exist_ok=True)
    model.detector.save_pretrained(out)
    Owlv2Processor(image_processor(model.detector.config), model.tokenizer).save_pretrained(out)


def measure(folder: Path, root: Path, *, test: bool) -> dict[str, float]:
    """Figures of the detector in `folder` on the synthetic data in `root`: test files, or validation files.

    Per benchmark mAP and `<name>_rank1` (share of objects whose caption is ranked first; one that is not found does not
    count as first); Hard also apart for combinations that no training shows; coarse AP, all and by frequency.
    """
    detector = OwlDetector.from_pretrained(folder)
    device = torch.device("cpu")
    files = {"hard": root / "annotations/validation_sets/1_attributes.json"}
    if test:
        files = {name: root / f"annotations/benchmarks/{stem}.json" for name, stem in BENCHMARKS.items()}
    suite = Suite.build(
        files,
        n_negatives={name: default_negatives(name) for name in files},
        images=ImageSet(root / "images", Preprocessor(detector.image_processor)),
        bank=TextBank(detector, policy="error", device=device),
    )
    coarse = root / f"annotations/lvis/coarse_{'test' if test else 'val'}.json"
    suite.add_coarse(coarse, protocol="noctowl", nms_iou=COARSE_NMS_IOU)
    outcome = suite.predict(detector, folder, batch_size=50, num_workers=0, device=device)
    conventions = {"ground_truth": "unmasked", "short_vocabularies": "drop", "nms_iou": 0.5}
    result = suite.score(outcome, conventions)
    metrics = result["metrics"]
    figures: dict[str, float] = {}
    for name, path in files.items():
        n = default_negatives(name)[0]
        figures[name] = metrics[f"fgovd/{name}/n{n}/map"]
        ranks = result["ranks"][name][f"n{n}"]
        figures[f"{name}_rank1"] = _rank1(ranks)
        if test and name == "hard":
            unseen = held_out_ids(path)
            figures["hard_held_out_rank1"] = _rank1({key: rank for key, rank in ranks.items() if key in unseen})
    for group in ("", "_frequent", "_common", "_rare"):
        figures[f"coarse{group}"] = next(v for k, v in metrics.items() if k.endswith(f"/ap{group}"))
    return {name: round(float(value), 4) for name, value in figures.items()}


def held_out_ids(path: Path) -> set[int]:
    """Ids of the test objects whose combination of class and colour no training shows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {entry["id"] for entry in data["annotations"] if entry.get("held_out")}


def _rank1(ranks: Mapping[int, int]) -> float:
    return float(np.mean([rank == 1 for rank in ranks.values()]))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_provenance(folder: Path, root: Path, recipe: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """provenance.json: how the folder was made, on what, what it scores, and the sha256 of its files."""
    files = sorted(path for path in folder.iterdir() if path.name not in (PROVENANCE, "README.md"))
    content = {
        "what": "NoctOWL's pretrained miniature",
        **recipe,
        "data": json.loads((root / MANIFEST).read_text(encoding="utf-8")),
        "figures": figures,
        "notes": [],  # what a reader has to know besides; the card repeats it
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "pillow", "torch", "transformers")},
        },
        "sha256": {path.name: sha256(path) for path in files},
    }
    (folder / PROVENANCE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_card(folder: Path, also: Sequence[Path] = ()) -> None:
    """README.md from the provenance of the folder, and of those of other seeds."""
    own, *others = (json.loads((path / PROVENANCE).read_text(encoding="utf-8")) for path in (folder, *also))
    stage1, stage2 = own["stage1"], own["stage2"]
    shares = np.array(PRETRAIN.weights) / sum(PRETRAIN.weights) * 100
    (folder / "README.md").write_text(
        CARD.format(
            folder=f"checkpoints/{folder.name}",
            parameters=sum(map(torch.numel, load_file(folder / "model.safetensors").values())) / 1e6,
            seed=stage1["seed"],
            minutes=round(own["cpu_seconds"] / 60),
            steps=stage1["steps"],
            batch=stage1["batch"],
            images=stage1["steps"] * stage1["batch"],
            head_images=stage2["images"],
            weights=", ".join(map(str, stage2["weights"])),
            wanted=stage2["wanted"],
            tried="; ".join(f"{entry['weight']} -> {entry['validation_rank1']:.3f}" for entry in own["tried"]),
            projection=own["projection_validation_rank1"],
            n_test=own["data"]["settings"]["n_test"],
            nms=COARSE_NMS_IOU,
            table=_table([own, *others]),
            rows=1 + len(others),
            notes="".join(f"- {note}\n" for note in own["notes"]),
            frequent_share=shares[0],
            common_share=shares[8],
            rare_share=shares[15],
        ),
        encoding="utf-8",
    )


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["seed", *(name.capitalize() for name in BENCHMARKS), "Hard, unseen", "Coarse", "f / c / r"]
    rows = [head, ["---"] * len(head)]
    for run in runs:
        test = run["figures"]["test"]
        cells = [f"{test[name]:.3f} ({test[f'{name}_rank1']:.2f})" for name in BENCHMARKS]
        groups = " / ".join(f"{test[f'coarse_{group}']:.3f}" for group in ("frequent", "common", "rare"))
        unseen = f"({test['hard_held_out_rank1']:.2f})"
        rows.append([str(run["stage1"]["seed"]), *cells, unseen, f"{test['coarse']:.3f}", groups])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    """The command line: the card of a folder, with the figures of other seeds."""
    parser = argparse.ArgumentParser(prog="noctowl.pretrain.card", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--also", type=Path, nargs="*", default=[])
    options = parser.parse_args(arguments)
    write_card(options.folder, options.also)


if __name__ == "__main__":
    main()
