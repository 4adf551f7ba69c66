"""Fixtures that several rooms share: the reference material beside the checkout, and small hand-made FG-OVD files."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def heard() -> None:
    """Loggers that an earlier test's library (logging.config) has switched off are on again."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("noctowl") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared: published annotation files, real images, golden numbers."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference material: {SHARED} is absent")
    return SHARED


@pytest.fixture(scope="session")
def coco_mini(shared: Path) -> Path:
    """A data root with 35 real COCO images and the annotations that belong to them."""
    root = shared / "data" / "coco_mini"
    if not root.is_dir():
        pytest.skip(f"no real images: {root} is absent")
    return root


@pytest.fixture
def fgovd() -> dict[str, Any]:
    """A small valid FG-OVD file: 2 images (ids 0 and 7), 3 vocabularies, 4 objects, ids with gaps, no iscrowd."""
    captions = ["A red cup.", "A blue cup.", "A green cup.", "A wooden chair.", "A plastic chair.", "A striped cat."]
    return {
        "images": [
            {"id": 0, "width": 100, "height": 50, "file_name": "val2017/000000000000.jpg"},
            {
                "id": 7,
                "width": 64,
                "height": 64,
                "coco_url": "http://images.cocodataset.org/train2017/000000000007.jpg",
            },
        ],
        "categories": [{"id": 10 * i, "name": caption} for i, caption in enumerate(captions)],
        "annotations": [
            {"id": 0, "image_id": 0, "category_id": 0, "bbox": [10, 5, 20, 30], "neg_category_ids": [10, 20]},
            {"id": 3, "image_id": 7, "category_id": 30, "bbox": [0, 0, 64, 64], "neg_category_ids": [40]},
            {"id": 9, "image_id": 0, "category_id": 0, "bbox": [50.5, 0, 10, 10], "neg_category_ids": [10, 20]},
            {"id": 4, "image_id": 0, "category_id": 50, "bbox": [1, 2, 3, 4]},
        ],
    }


@pytest.fixture
def write_fgovd(tmp_path: Path) -> Callable[..., Path]:
    """write_fgovd(data, name="1_attributes") -> tmp_path/annotations/benchmarks/<name>.json, written."""

    def write(data: Any, name: str = "1_attributes", folder: str = "benchmarks") -> Path:
        path = tmp_path / "annotations" / folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


@pytest.fixture(scope="session")
def fresh_detector() -> Callable[..., Any]:
    """fresh_detector("owlv2" | "owlvit", seed=0): the miniature with random weights, a new one at each call."""
    from transformers import OwlViTConfig

    from noctowl.architectures import image_processor, initialise, tiny
    from noctowl.model import OwlDetector
    from noctowl.text import small_clip_tokenizer

    tokenizer = small_clip_tokenizer(())

    def make(kind: str = "owlv2", seed: int = 0) -> OwlDetector:
        config: Any = tiny(tokenizer)
        if kind == "owlvit":
            like = config.to_dict()
            towers = {
                part: {k: v for k, v in like[part].items() if k not in ("model_type", "architectures")}
                for part in ("text_config", "vision_config")
            }
            config = OwlViTConfig(**towers, projection_dim=96)
        model, processor = initialise(config, seed=seed), image_processor(config)
        return OwlDetector(model, tokenizer=tokenizer, image_processor=processor, base_id=f"small {kind}, seed {seed}")

    return make


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered data root: 12 training, 6 validation and 6 test images."""
    from noctowl.data.synthetic import write_synthetic

    return write_synthetic(tmp_path_factory.mktemp("world") / "root", n_train=12, n_val=6, n_test=6)


@dataclass
class Called:
    """What a call of train.py or evaluate.py left: exit code, what it printed, and the results that it points to."""

    code: int
    out: str
    err: str

    @property
    def folder(self) -> Path:
        last = self.out.strip().splitlines()[-1]
        assert last.startswith("results: ")
        return Path(last.removeprefix("results: ")).parent

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Called]:
    """command("train", "loss=bce", ...) runs the command line in this process, on the CPU and without progress bars."""
    import contextlib
    import io

    from noctowl.jobs import main

    def run(entry: str, *overrides: str) -> Called:
        out, err = io.StringIO(), io.StringIO()
        common = ["trainer=cpu", "trainer.progress=false"]
        if not any(o.startswith("report=") for o in overrides):
            common.append("report=false")
        if not any(o.startswith(("output_dir=", "run_dir=")) for o in overrides):
            common.append(f"output_dir={tmp_path_factory.mktemp('outputs')}")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(entry, [*common, *overrides])
        return Called(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def small(world: Path) -> list[str]:
    """Overrides of a run of seconds on the rendered world: one benchmark, one epoch."""
    return [
        "model=tiny",
        "model.source=tiny",
        "model.weights=random",
        "data=fgovd",
        f"data.root={world}",
        "data.coarse_names=lvis/coarse_val.json",
        "data.short_vocabularies=keep",
        "benchmark.short_vocabularies=keep",
        "benchmark.names=[hard]",
        "trainer.max_epochs=1",
    ]
