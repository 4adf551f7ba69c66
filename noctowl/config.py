"""The schema of conf/: what keys exist, their types and ranges, and which combinations make sense.

`check(tree, schema)` reports *every* problem. Nothing here knows Hydra: `run.py` composes the tree and says where a
key came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from timm.optim import list_optimizers

from noctowl.validation import Problem, Range, check_node, did_you_mean

CONTROL_NAMES = ("blind", "blind_embeddings", "centroid", "centroid_embeddings", "head_prior", "oracle", "shuffled")
BENCHMARK_NAMES = ("hard", "medium", "easy", "trivial", "color", "material", "pattern", "transparency")


@dataclass
class Recipe:
    lr: Annotated[float, Range(gt=0)]
    weight_decay: Annotated[float, Range(ge=0)]
    batch_size: Annotated[int, Range(ge=1)]
    effective_batch_size: Annotated[int, Range(ge=1)]
    max_epochs: Annotated[int, Range(ge=1)]
    seed: Annotated[int, Range(ge=0)]


@dataclass
class Model:
    name: str
    source: str
    revision: str | None
    weights: Literal["pretrained", "random"]
    model_type: Literal["owlvit", "owlv2"]
    pad_value: Annotated[float, Range(ge=0, le=1)]
    attention: Literal["sdpa", "eager"]
    recipe: Recipe


@dataclass
class Triplet:
    name: Literal["triplet"]
    margin: Annotated[float, Range(ge=0, le=2)]
    weight: Annotated[float, Range(ge=0)]
    background_weight: Annotated[float, Range(ge=0)]
    gamma: Annotated[float, Range(ge=0)]


@dataclass
class CrossEntropy:
    name: Literal["cross_entropy"]
    temperature: Annotated[float, Range(gt=0)]
    weight: Annotated[float, Range(ge=0)]
    background_weight: Annotated[float, Range(ge=0)]
    gamma: Annotated[float, Range(ge=0)]


@dataclass
class Bce:
    name: Literal["bce"]
    weight: Annotated[float, Range(ge=0)]
    background_weight: Annotated[float, Range(ge=0)]
    gamma: Annotated[float, Range(ge=0)]


@dataclass
class NoDistillation:
    name: Literal["none"]


@dataclass
class Distillation:
    name: Literal["mse", "ce"]
    weight: Annotated[float, Range(gt=0)]


@dataclass
class Data:
    name: str
    root: str
    images: str | None
    annotations: str | None
    train_file: str
    val_file: str
    n_negatives: Annotated[int, Range(ge=1)]
    short_vocabularies: Literal["drop", "keep"]
    token_policy: Literal["drop", "truncate", "error"]
    coarse_names: str
    coarse_file: str | None
    coarse_val_file: str | None
    coarse_nms_iou: Annotated[float | None, Range(gt=0, le=1)]


@dataclass
class Synthetic(Data):
    """A data set that is written into a cache folder, `root`, the first time it is used."""

    name: Literal["synthetic"]
    seed: Annotated[int, Range(ge=0)]
    n_train: Annotated[int, Range(ge=1)]
    n_val: Annotated[int, Range(ge=1)]
    n_test: Annotated[int, Range(ge=1)]


@dataclass
class Features:
    mode: Literal["auto", "memory", "disk", "live", "stream"]
    root: str
    dtype: Literal["fp32", "fp16", "int8"]
    background: Annotated[int | None, Range(ge=1)]
    background_seed: Annotated[int, Range(ge=0)]


@dataclass
class Benchmark:
    name: str
    names: list[Literal[BENCHMARK_NAMES]] | None  # type: ignore[valid-type]
    n_negatives: Annotated[list[int] | None, Range(ge=0)]
    ground_truth: Literal["unmasked", "masked"]
    short_vocabularies: Literal["drop", "keep"]
    nms_iou: Annotated[float, Range(gt=0, le=1)]
    top: Annotated[int, Range(ge=1)]
    coarse_protocol: Literal["noctowl", "owl"]
    intervals: Annotated[int, Range(ge=0)]
    coarse_intervals: Annotated[int | None, Range(ge=0)]
    controls: Literal["auto"] | list[Literal[CONTROL_NAMES]]  # type: ignore[valid-type]
    control_captions: list[str] | None
    batch_size: Annotated[int, Range(ge=1)]


@dataclass
class Trainer:
    accelerator: Literal["auto", "cpu", "gpu", "mps"]
    devices: Annotated[int, Range(ge=1)]
    num_nodes: Annotated[int, Range(ge=1)]
    strategy: Literal["auto", "ddp"]
    precision: Literal["32-true", "bf16-mixed", "16-mixed"]
    batch_size: Annotated[int, Range(ge=1)]
    effective_batch_size: Annotated[int, Range(ge=1)]
    max_epochs: Annotated[int, Range(ge=1)]
    num_workers: Annotated[int, Range(ge=0)]
    log_every_n_steps: Annotated[int, Range(ge=1)]
    limit_train_batches: Annotated[int | None, Range(ge=1)]
    progress: bool


@dataclass
class Csv:
    name: Literal["csv"]


@dataclass
class Wandb:
    name: Literal["wandb"]
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass
class Tensorboard:
    name: Literal["tensorboard"]


@dataclass
class Optimizer:
    name: str
    lr: Annotated[float, Range(gt=0)]
    weight_decay: Annotated[float, Range(ge=0)]
    decay_bias: bool


@dataclass
class Schedule:
    name: Literal["constant", "cosine"]
    warmup_epochs: Annotated[int, Range(ge=0)]
    min_lr: Annotated[float, Range(ge=0)]


@dataclass
class Ema:
    decay: Annotated[float | None, Range(ge=0, lt=1)]


@dataclass
class Selection:
    rule: Literal["tradeoff", "published"]
    max_coarse_loss: Annotated[float, Range(ge=0, le=1)]
    n_negatives: Annotated[int, Range(ge=1)]
    every_n_epochs: Annotated[int, Range(ge=0)]
    before_training: bool


@dataclass
class Common:
    model: Model
    data: Synthetic | Data
    features: Features
    benchmark: Benchmark
    trainer: Trainer
    logger: Csv | Wandb | Tensorboard
    name: str
    seed: Annotated[int, Range(ge=0)]
    compat: Literal["published", "training", "clean"]
    output_dir: str
    run_dir: str | None
    report: bool


@dataclass
class TrainConfig(Common):
    loss: Triplet | CrossEntropy | Bce
    distill: NoDistillation | Distillation
    optimizer: Optimizer
    schedule: Schedule
    ema: Ema
    selection: Selection
    test: bool
    together: bool
    resume: str | None
    resume_sweep: str | None


@dataclass
class EvaluateConfig(Common):
    checkpoint: str | None
    predictions: str | None


def check(tree: Mapping[str, Any], schema: type) -> list[Problem]:
    """All problems of a composed configuration: keys, types, ranges and combinations.

    A combination is judged only where the groups that it joins are sound in themselves.

    Args:
        tree: plain nested dict (interpolations resolved).
        schema: TrainConfig or EvaluateConfig.
    """
    problems = check_node(tree, schema, "")
    broken = {problem.key.split(".")[0] for problem in problems}
    rules = (*COMMON_RULES, *(TRAINING_RULES if schema is TrainConfig else EVALUATION_RULES))
    for groups, rule in rules:
        if not broken & set(groups):
            problems += rule(tree)
    return problems


def _optimizer_known(tree: Mapping[str, Any]) -> list[Problem]:
    name, known = tree["optimizer"]["name"], [str(o) for o in list_optimizers()]
    if name in known:
        return []
    hint = did_you_mean(name, known)
    return [Problem("optimizer.name", repr(name), "an optimiser that timm knows, such as adamw", hint)]


def _batches_divide(tree: Mapping[str, Any]) -> list[Problem]:
    trainer = tree["trainer"]
    processes = trainer["devices"] * trainer["num_nodes"]
    step = trainer["batch_size"] * processes
    if trainer["effective_batch_size"] % step == 0:
        return []
    allowed = f"a multiple of batch_size x processes = {trainer['batch_size']} x {processes} = {step}"
    return [Problem("trainer.effective_batch_size", str(trainer["effective_batch_size"]), allowed)]


def _epochs_fit(tree: Mapping[str, Any]) -> list[Problem]:
    epochs = tree["trainer"]["max_epochs"]
    limits = (
        ("selection.every_n_epochs", tree["selection"]["every_n_epochs"], epochs),
        ("schedule.warmup_epochs", tree["schedule"]["warmup_epochs"], epochs - 1),
    )
    return [
        Problem(key, str(value), f"at most {limit} with trainer.max_epochs = {epochs}")
        for key, value, limit in limits
        if value > limit
    ]


def _reference_exists(tree: Mapping[str, Any]) -> list[Problem]:
    chosen = tree["selection"]
    if chosen["rule"] != "tradeoff" or chosen["before_training"] or not chosen["every_n_epochs"]:
        return []
    if tree["data"]["coarse_val_file"] is None or tree["compat"] == "published":
        return []
    return [
        Problem(
            "selection.before_training", "false", "true with selection.rule=tradeoff: losses are counted from there"
        )
    ]


def _something_trains(tree: Mapping[str, Any]) -> list[Problem]:
    loss = tree["loss"]
    if loss["weight"] or loss["background_weight"] or tree["distill"]["name"] != "none":
        return []
    return [Problem("loss.weight", "0 for every term", "at least one loss term with a weight above 0")]


def _one_source(tree: Mapping[str, Any]) -> list[Problem]:
    if tree["checkpoint"] is None or tree["predictions"] is None:
        return []
    return [Problem("predictions", "set beside checkpoint", "one of the two: a model or saved predictions")]


def _precision_exists(tree: Mapping[str, Any]) -> list[Problem]:
    if tree["trainer"]["accelerator"] != "cpu" or tree["trainer"]["precision"] != "16-mixed":
        return []
    return [Problem("trainer.precision", "16-mixed on the CPU", "32-true or bf16-mixed there")]


def _padding_exists(tree: Mapping[str, Any]) -> list[Problem]:
    model = tree["model"]
    if model["model_type"] != "owlvit" or model["pad_value"] == 0:
        return []
    found = f"{model['pad_value']} for an OWL-ViT"
    return [Problem("model.pad_value", found, "0 (OWL-ViT warps images, nothing is padded)")]


def _some_n(tree: Mapping[str, Any]) -> list[Problem]:
    if tree["benchmark"]["n_negatives"] != []:
        return []
    return [Problem("benchmark.n_negatives", "[]", "one N at least, or null for each benchmark's own")]


def _sample_stored(tree: Mapping[str, Any]) -> list[Problem]:
    features = tree["features"]
    if features["background"] is None or features["mode"] == "disk":
        return []
    found = f"{features['background']} with features.mode={features['mode']}"
    return [Problem("features.background", found, "null (all patches), or features=disk, where samples are kept")]


def _no_empty_path(tree: Mapping[str, Any]) -> list[Problem]:
    """An empty value is an unset variable of a shell, and would be the working directory."""
    given = {"resume": tree.get("resume"), "run_dir": tree["run_dir"], "data.root": tree["data"]["root"]}
    return [Problem(key, "''", "a path, or null") for key, value in given.items() if value == ""]


def _all_patches(tree: Mapping[str, Any]) -> list[Problem]:
    if tree["features"]["background"] is None:
        return []
    allowed = "null: evaluation needs all patches, a sample of them serves training only"
    return [Problem("features.background", str(tree["features"]["background"]), allowed)]


# (groups that a rule reads, rule)
COMMON_RULES = ((("benchmark",), _some_n), (("trainer",), _precision_exists), (("model",), _padding_exists))
TRAINING_RULES = (
    (("optimizer",), _optimizer_known),
    (("trainer",), _batches_divide),
    (("trainer", "selection", "schedule"), _epochs_fit),
    (("loss", "distill"), _something_trains),
    (("selection", "data", "compat"), _reference_exists),
    (("features",), _sample_stored),
    (("resume", "run_dir", "data"), _no_empty_path),
)
EVALUATION_RULES = (
    (("checkpoint", "predictions"), _one_source),
    (("features",), _all_patches),
    (("run_dir", "data"), _no_empty_path),
)
