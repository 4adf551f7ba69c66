"""From a configuration to the objects of a run: folders, detector, suites. Only `run.py` calls this.

`tree` is a checked, plain configuration (see `noctowl.config`).
"""

import copy
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from noctowl import runfolder, training
from noctowl.compose import conf_dir
from noctowl.config import EvaluateConfig, check
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_annotations, find_benchmarks, find_file, find_images
from noctowl.data.synthetic import SyntheticSettings, synthetic_root
from noctowl.errors import DataError, ModelError
from noctowl.eval.blind import concatenate, text_sets
from noctowl.eval.evidence import CHEAP, Asked
from noctowl.eval.suite import KEYS, Suite, default_negatives
from noctowl.export import load_head
from noctowl.features import ImageSet, TextBank
from noctowl.frozen import Frozen, features_of, make_images, stores_of, text_bank, training_features, work_of
from noctowl.hashing import state_sha256
from noctowl.model import OwlDetector
from noctowl.runfolder import read_results
from noctowl.store import build
from noctowl.validation import raise_for

Tree = dict[str, Any]
log = logging.getLogger(__name__)


def inherit(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Model, data and compat of the run that is evaluated, unless the command line chooses others.

    Single keys of the command line (data.root=…) are set on top of what the run had. Raises ConfigError where the
    run's configuration is none of this version's.
    """
    given = {o.lstrip("+~").split("=")[0] for o in overrides}
    for source in (tree["checkpoint"], tree["predictions"]):
        if source is None:
            continue
        run = next((p for p in (Path(source), Path(source).parent) if (p / "config.yaml").is_file()), None)
        if run is not None:
            config = runfolder.read_config(run)
            for group in {"model", "data"} - given:
                keys = [key.split(".")[1:] for key in given if key.startswith(f"{group}.")]
                tree = {**tree, group: _overlaid(config.get(group, {}), tree[group], keys)}
            if "compat" not in given:
                tree = {**tree, "compat": config.get("compat", tree["compat"])}
            where = str(run / "config.yaml")
            raise_for(check(tree, EvaluateConfig), lambda _, where=where: where)  # type: ignore[misc]
        elif "data" not in {key.split(".")[0] for key in given}:
            log.warning("%s does not say what data it belongs to; evaluating on data=%s", source, tree["data"]["name"])
    return tree


def _overlaid(base: Tree, top: Tree, keys: Sequence[Sequence[str]]) -> Tree:
    """`base` with the values that `top` has at `keys`."""
    found = copy.deepcopy(base)
    for key in keys:
        node, source = found, top
        for part in key[:-1]:
            node, source = node.setdefault(part, {}), source[part]
        node[key[-1]] = source[key[-1]]
    return found


def data_root(data: Mapping[str, Any]) -> Path:
    """The folder of a data set; the synthetic world is written into its cache first if it is not there yet."""
    root = Path(data["root"]).expanduser()
    if data["name"] != "synthetic":
        return root
    return synthetic_root(root, SyntheticSettings(**{key: data[key] for key in ("seed", "n_train", "n_val", "n_test")}))


def locate(data: Mapping[str, Any]) -> dict[str, Path]:
    """Folders of annotations and images."""
    root = data_root(data)
    return {"annotations": find_annotations(root, data["annotations"]), "images": find_images(root, data["images"])}


def pick_device(accelerator: str) -> torch.device:
    """The device that evaluation and feature building run on: the one Lightning gives to this process."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if accelerator in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if accelerator in ("gpu", "mps"):
        raise DataError(f"trainer.accelerator={accelerator}: none is available here; use trainer=cpu")
    return torch.device("cpu")


@dataclass
class Prepared:
    """All that training needs, read, planned and encoded; constant but for the detector's head."""

    detector: OwlDetector
    device: torch.device
    bank: TextBank
    data: training.TrainingData
    names: list[str]  # for distillation
    queries: torch.Tensor  # [K, D] their embeddings
    validation: Suite
    test: Suite | None
    frozen: Frozen


@dataclass
class Evaluated:
    """What evaluating a head of one base model on one set of benchmarks needs."""

    detector: OwlDetector
    device: torch.device
    bank: TextBank
    suite: Suite
    frozen: Frozen


class Preparation:
    """Prepares runs; consecutive runs that differ in their head only (loss, rate, seed, checkpoint) share it all.

    So a sweep in one process loads, reads and encodes once. Files are looked at when the first of such runs starts.
    """

    SECTIONS = ("model", "data", "features", "benchmark", "trainer")

    def __init__(self) -> None:
        self._key = ""
        self._ready: Any = None

    @classmethod
    def key(cls, tree: Tree) -> str:
        """Equal for training runs that can share a preparation."""
        sections = (*cls.SECTIONS, "selection", "test")
        return json.dumps({section: tree[section] for section in sections}, sort_keys=True)

    def __call__(self, tree: Tree) -> Prepared:
        """Everything for the training run of `tree`, with the head as it was pretrained."""
        return self._share(self.key(tree), lambda: prepare(tree))

    def evaluation(self, tree: Tree) -> Evaluated:
        """Everything for the evaluation that `tree` describes, with the head that it names."""
        folder = tree["checkpoint"] is not None and not is_run(tree["checkpoint"])
        sections = {section: tree[section] for section in self.SECTIONS}
        key = json.dumps([sections, tree["checkpoint"] if folder else None], sort_keys=True)
        model = {**tree["model"], **EXPORTED, "source": tree["checkpoint"]} if folder else tree["model"]
        ready: Evaluated = self._share(key, lambda: prepare_evaluation(tree, model))
        if tree["checkpoint"] is not None and not folder:
            load_head_of(ready.detector, tree["checkpoint"])
        return ready

    def _share(self, key: str, make: Callable[[], Any]) -> Any:
        if self._ready is not None and key == self._key:
            self._ready.frozen.encoded = 0
        else:
            self._ready = None  # let go of the last one's memory first
            self._ready, self._key = make(), key
        self._ready.detector.reset_head()
        self._ready.detector.to(self._ready.device)
        return self._ready


def prepare_evaluation(tree: Tree, model: Mapping[str, Any]) -> Evaluated:
    """Detector, benchmarks and features; "auto" keeps features where they fit into memory and writes nothing."""
    device = pick_device(tree["trainer"]["accelerator"])
    place = locate(tree["data"])
    detector = load_detector(model).to(device)
    bank = text_bank(tree, detector, device)
    images = make_images(detector, place["images"], tree["model"]["pad_value"])
    suite = benchmark_suite(tree, detector, place, bank, images)
    frozen = features_of(tree, detector, images, device, keep=False)
    return Evaluated(detector, device, bank, suite, frozen)


def prepare(tree: Tree) -> Prepared:
    """Detector, data, suites and features of a training run."""
    ready = planned(tree)
    evaluated = rows_evaluated(ready.validation, ready.test)
    ready.frozen = training_features(
        tree,
        ready.detector,
        ready.validation.images,
        ready.device,
        dataset=ready.data.dataset,
        evaluated=evaluated,
    )
    ready.frozen.give(ready.data.dataset)
    return ready


def planned(tree: Tree) -> Prepared:
    """A training run before any image is encoded: detector, data, suites and their texts."""
    device = pick_device(tree["trainer"]["accelerator"])
    detector = load_detector(tree["model"]).to(device)
    place = locate(tree["data"])
    bank = text_bank(tree, detector, device)
    images = make_images(detector, place["images"], tree["model"]["pad_value"])
    data = training.training_data(
        find_file(place["annotations"], tree["data"]["train_file"]),
        detector=detector,
        images=images,
        bank=bank,
        n_negatives=tree["data"]["n_negatives"],
        short_vocabularies=tree["data"]["short_vocabularies"],
    )
    names = training.coarse_names(tree["data"]["coarse_names"], place["annotations"])
    queries = training.coarse_queries(bank, names)
    validation = validation_suite(tree, detector, place, bank, images)
    test = benchmark_suite(tree, detector, place, bank, images) if tree["test"] else None
    data.dataset.embeddings = bank.embeddings  # the bank has grown since
    data.dataset.images = images.for_workers()
    nothing = Frozen(None, "no image is encoded yet")
    return Prepared(detector, device, bank, data, names, queries, validation, test, nothing)


def rows_evaluated(validation: Suite, test: Suite | None) -> list[int]:
    """Images that benchmarks are computed on: they need all patches."""
    return sorted({*validation.image_rows, *(test.image_rows if test is not None else ())})


def build_features(tree: Tree) -> str:
    """Have features of all images of the training, validation and benchmark files in the store; says what was done.

    Processes of one launch (accelerate, torchrun) encode a share each; other builders share through the store's claims.
    """
    ready = planned(tree)
    images, work, device = ready.validation.images, work_of(tree, ready.device), ready.device
    evaluated = rows_evaluated(ready.validation, ready.test)
    state, done = PartialState(cpu=device.type == "cpu"), []
    stores = stores_of(tree, ready.detector, images, device, dataset=ready.data.dataset, evaluated=evaluated)
    for shelf, wanted, later in stores:
        with state.split_between_processes(wanted) as rows:
            own = build(shelf, ready.detector, images, rows, beside=later, **work)
        state.wait_for_everyone()
        rest = build(shelf, ready.detector, images, wanted, **work)  # nothing, unless another process lost its share
        done.append(f"{own.found} found, {own.encoded + rest.encoded} encoded; {rest.images} images in {shelf.folder}")
    return "\n".join(done)


def load_detector(model: Mapping[str, Any]) -> OwlDetector:
    """The base model of a configuration. A relative source is looked for here, then beside the project's conf/."""
    source = str(model["source"])
    beside = conf_dir().parent / source
    if not Path(source).exists() and beside.exists():
        source = str(beside)
    if model["weights"] == "random" and not Path(source).exists():
        source = str(model["name"])  # the architecture; no hub needed
    return OwlDetector.from_pretrained(
        source,
        revision=None if Path(source).exists() else model["revision"],  # folders have none
        weights=model["weights"],
        seed=model["recipe"]["seed"],
        expect=model["model_type"],
        attention=model["attention"],
    )


EXPORTED: dict[str, Any] = {"weights": "pretrained"}  # a folder or hub id in the place of a base


def is_run(checkpoint: str) -> bool:
    """A run folder (its head belongs on the base in its config.yaml), not an exported folder or hub id."""
    return (Path(checkpoint) / "config.yaml").is_file()


def head_of(run: str) -> Path:
    """The selected head of a run. Raises DataError if there is none."""
    head = Path(run) / "checkpoints" / "best.safetensors"
    if not head.is_file():
        raise DataError(f"{head} is missing: the run has not kept an epoch yet, or it failed; see its metrics.csv")
    return head


def load_checkpoint(run: Path, model: Mapping[str, Any]) -> OwlDetector:
    """A run's selected head on its base."""
    detector = load_detector(model)
    load_head_of(detector, run)
    return detector


def load_head_of(detector: OwlDetector, run: str | Path) -> None:
    """Puts a run's selected head into the detector; raises ModelError if the run's results are of another head."""
    head, results = head_of(str(run)), Path(run) / "results.json"
    load_head(detector, head)
    if not results.is_file():
        log.warning("%s has no results.json: the run has not finished, this is its best head so far", run)
        return
    expected = read_results(results).get("provenance", {}).get("head_sha256")
    found = state_sha256(detector.trainable_state())
    if expected is not None and expected != found:
        raise ModelError(
            f"{head} is not the head that {results} is about: sha256 of its weights is {found}, provenance.head_sha256 "
            f"there {expected}. Put the run's own head back, or finish the run again with resume={run}."
        )


def conventions_of(tree: Tree) -> Tree:
    """Keyword arguments of the FG-OVD scorer."""
    keys = ("ground_truth", "short_vocabularies", "nms_iou", "top")
    chosen = {key: tree["benchmark"][key] for key in keys}
    return {**chosen, "published_median": tree["compat"] == "published"}


def asked_of(tree: Tree, annotations: Path) -> Asked:
    """Controls and intervals that stand beside the figures; their seed is the same for all runs, so that they compare.

    Raises DataError for caption files that are not there.
    """
    chosen = tree["benchmark"]
    files = [read_fgovd(find_file(annotations, name)) for name in chosen["control_captions"] or ()]
    return Asked(
        controls=CHEAP if chosen["controls"] == "auto" else tuple(chosen["controls"]),
        intervals=chosen["intervals"],
        coarse_intervals=chosen["coarse_intervals"],
        train=concatenate([text_sets(file) for file in files]) if files else None,
    )


def benchmark_suite(
    tree: Tree, detector: OwlDetector, place: Mapping[str, Path], bank: TextBank, images: ImageSet
) -> Suite:
    """All benchmark files asked for, and the coarse file if there is one. Raises DataError where nothing is asked."""
    names = tree["benchmark"]["names"]
    if names == [] and tree["data"]["coarse_file"] is None:
        raise DataError(
            "nothing to evaluate: benchmark.names is [] (no FG-OVD benchmark) and data.coarse_file is null. Set "
            "data.coarse_file to an LVIS-format json, or choose benchmark=fgovd."
        )
    files = {} if names == [] else find_benchmarks(place["annotations"], names)
    asked = tree["benchmark"]["n_negatives"]
    short = tree["benchmark"]["short_vocabularies"]
    suite = _suite(tree, detector, place, bank, images, files, asked, short, "coarse_file")
    suite.asked = asked_of(tree, place["annotations"])
    return suite


def validation_suite(
    tree: Tree, detector: OwlDetector, place: Mapping[str, Path], bank: TextBank, images: ImageSet
) -> Suite:
    """The validation file at the N that selects, and the coarse validation file if there is one."""
    file = find_file(place["annotations"], tree["data"]["val_file"])
    asked = [tree["selection"]["n_negatives"]]
    short = tree["data"]["short_vocabularies"]
    keys = ("selection.n_negatives", "data.short_vocabularies")
    return _suite(tree, detector, place, bank, images, {"validation": file}, asked, short, "coarse_val_file", keys)


def _suite(
    tree: Tree,
    detector: OwlDetector,
    place: Mapping[str, Path],
    bank: TextBank,
    images: ImageSet,
    files: Mapping[str, Path],
    n_negatives: Sequence[int] | None,
    short: Any,
    coarse_key: str,
    keys: tuple[str, str] = KEYS,
) -> Suite:
    suite = Suite.build(
        files,
        n_negatives={name: tuple(n_negatives or default_negatives(name)) for name in files},
        images=images,
        bank=bank,
        short_vocabularies=short,
        top=tree["benchmark"]["top"],
        settings={"base": detector.base_id, "base_sha256": detector.content_hash()},
        keys=keys,
    )
    if tree["data"][coarse_key] is not None:
        file = find_file(place["annotations"], tree["data"][coarse_key])
        protocol = tree["benchmark"]["coarse_protocol"]
        suite.add_coarse(file, protocol=protocol, nms_iou=tree["data"]["coarse_nms_iou"])
    return suite


def validation_figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Short names: "fgovd/validation/n10/map" -> "map", "lvis/ap" -> "lvis_ap"; the other convention is left out."""
    figures = {}
    for key, value in metrics.items():
        parts = key.split("/")
        if parts[0] == "lvis":
            figures["_".join(parts)] = value
        elif len(parts) == 4:
            figures[parts[3]] = value
    return figures
