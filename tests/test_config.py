"""The configuration: every choice of every group composes, and every kind of mistake is named."""

from pathlib import Path

import pytest
import yaml

from noctowl.compose import compose, conf_dir, dispatch, jobs
from noctowl.config import TrainConfig, check
from noctowl.errors import ConfigError

GROUPS = ("model", "loss", "distill", "data", "features", "benchmark", "trainer", "logger")


def test_names_of_the_groups():
    found = {group: sorted(p.stem for p in (conf_dir() / group).glob("*.yaml")) for group in GROUPS}
    assert found["model"] == ["owl_b16", "owl_l14", "owlv2_b16", "owlv2_l14", "tiny"]
    assert found["loss"] == ["bce", "cross_entropy", "triplet"]
    assert {"none", "mse", "ce"} <= set(found["distill"])
    assert found["trainer"] == ["cpu", "ddp", "debug", "default"]


@pytest.mark.parametrize("entry", ["train", "evaluate"])
def test_every_choice_composes(entry):
    groups = yaml.safe_load((conf_dir() / f"{entry}.yaml").read_text())["defaults"]
    names = [g for item in groups if isinstance(item, dict) for g in item if "/" not in g and g != "experiment"]
    for group in names:
        for file in (conf_dir() / group).glob("*.yaml"):
            assert compose(entry, [f"{group}={file.stem}"])[group]


@pytest.mark.parametrize("file", sorted(conf_dir().glob("experiment/**/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(file):
    name = file.relative_to(conf_dir() / "experiment").with_suffix("").as_posix()
    assert compose("train", [f"experiment={name}"])["name"] != "default"


@pytest.mark.parametrize(
    ("model", "lr"), [("owl_b16", 3e-5), ("owlv2_b16", 3e-5), ("owl_l14", 3e-6), ("owlv2_l14", 3e-6)]
)
def test_published_recipe_is_the_default(model, lr):
    tree = compose("train", [f"model={model}", "data=fgovd"])
    assert tree["optimizer"] == {"name": "adamw", "lr": lr, "weight_decay": 0.1, "decay_bias": True}
    assert tree["schedule"]["name"] == "constant"
    assert tree["schedule"]["warmup_epochs"] == 0
    assert (tree["trainer"]["effective_batch_size"], tree["trainer"]["max_epochs"], tree["seed"]) == (32, 20, 123)
    assert (tree["loss"]["margin"], tree["distill"]) == (0.15, {"name": "mse", "weight": 1.0})
    assert (tree["data"]["n_negatives"], tree["selection"]["n_negatives"], tree["compat"]) == (10, 10, "training")


MISTAKES = {
    "loss=tripplet": ("loss (command line)", "'tripplet'", "bce, cross_entropy, triplet", "did you mean 'triplet'?"),
    "loss.margin=-1": ("loss.margin (command line)", "found -1", ">= 0"),
    "trainer.max_epoch=3": ("trainer.max_epoch", "unknown key", "did you mean 'max_epochs'?"),
    "modle=tiny": ("modle", "unknown key", "did you mean 'model'?"),
    "selection.n_negatives=many": ("selection.n_negatives", "'many'", "a whole number >= 1"),
    "trainer.devices=1.5": ("trainer.devices", "1.5", "a whole number >= 1"),
    "optimizer.decay_bias=3": ("optimizer.decay_bias", "3", "true or false"),
    "benchmark.names=[hard,esy]": ("benchmark.names", "['hard', 'esy']", "did you mean 'easy'?"),
    "benchmark.n_negatives=[5,-1]": ("benchmark.n_negatives", "[5, -1]", "a list of a whole number >= 0"),
    "ema.decay=1.0": ("ema.decay", "1.0", "< 1"),
    "optimizer.lr=nan": ("optimizer.lr", "nan", "> 0"),
    "trainer=3": ("trainer (command line)", "3", "cpu, ddp, debug, default"),
    "foo": ("foo (command line)", "cannot be read", "key=value"),
    "data.root=/a b (c)": ("(command line)", "cannot be read", """'data.root="/a b (c)"'"""),
    "x=[1": ("x=[1", "cannot be read", "key=value"),
}

AGAIN = {  # of keys that are above too
    "+ema={decay: 3}": ("ema.decay (command line)", "3", "< 1"),
    "model.recipe.lr=-1": ("model.recipe.lr (command line)", "-1", "> 0"),
    "benchmark.n_negatives=[]": ("benchmark.n_negatives (command line)", "[]", "one N at least"),
}


@pytest.mark.parametrize("override", MISTAKES | AGAIN)
def test_a_mistake_is_named(override):
    with pytest.raises(ConfigError) as error:
        compose("train", [override])
    assert str(error.value).startswith("1 problem in")
    for words in (MISTAKES | AGAIN)[override]:
        assert words in str(error.value)


def test_all_mistakes_at_once():
    with pytest.raises(ConfigError) as error:
        compose("train", list(MISTAKES))
    message = str(error.value)
    assert message.startswith(f"{len(MISTAKES)} problems in")
    for words in MISTAKES.values():
        assert words[0] in message


COMBINATIONS = {
    ("trainer.batch_size=7",): ("trainer.effective_batch_size (conf/trainer/default.yaml)", "7 x 1 = 7"),
    ("optimizer.name=adamv",): ("optimizer.name", "did you mean 'adam"),
    ("schedule.warmup_epochs=9",): ("schedule.warmup_epochs", "at most 3 with trainer.max_epochs = 4"),
    ("selection.every_n_epochs=9",): ("selection.every_n_epochs", "at most 4"),
    ("distill=none", "loss.weight=0", "loss.background_weight=0"): ("loss.weight", "at least one loss term"),
    ("trainer=cpu", "trainer.precision=16-mixed"): ("trainer.precision", "16-mixed on the CPU"),
    ("model=owl_b16", "model.pad_value=0.5"): ("model.pad_value", "warps"),
    ("loss=cross_entropy", "loss.margin=0.2"): ("loss.margin", "unknown key", "temperature"),
    ("distill=none", "distill.weight=2"): ("distill.weight", "unknown key"),
}


@pytest.mark.parametrize("overrides", COMBINATIONS, ids=" ".join)
def test_an_impossible_combination_is_named(overrides):
    with pytest.raises(ConfigError) as error:
        compose("train", list(overrides))
    for words in COMBINATIONS[overrides]:
        assert words in str(error.value)


def test_combinations_are_reported_beside_other_problems():
    with pytest.raises(ConfigError) as error:
        compose("train", ["trainer.batch_size=7", "loss.margin=-1"])
    assert "7 x 1 = 7" in str(error.value)
    assert "loss.margin" in str(error.value)


def test_evaluate_takes_one_source():
    with pytest.raises(ConfigError, match="one of the two"):
        compose("evaluate", ["checkpoint=a", "predictions=b"])


def test_a_missing_key_and_a_wrong_group_in_a_plain_tree():
    tree = compose("train", [])
    del tree["loss"]["margin"]
    tree["ema"] = 3
    problems = {p.key: p for p in check(tree, TrainConfig)}
    assert problems["loss.margin"].found == "nothing"
    assert "decay" in problems["ema"].allowed


def test_a_sweep_is_split_into_jobs():
    found = jobs(["loss=triplet,cross_entropy", "distill=none,mse", "seed=1"])
    assert found == [
        [f"loss={loss}", f"distill={distill}", "seed=1"]
        for loss in ("triplet", "cross_entropy")
        for distill in ("none", "mse")
    ]


def test_jobs_of_a_sweep_do_not_share_a_folder():
    ran = []
    with pytest.raises(ConfigError, match="run_dir: found here for 2 jobs of the sweep; allowed: a folder for each"):
        dispatch("train", ["loss=triplet,bce", "run_dir=here", "-m"], lambda jobs, _: ran.append(jobs))
    assert ran == []
    dispatch("train", ["run_dir=here,there", "-m"], lambda jobs, _: ran.append(jobs))
    assert [tree["run_dir"] for tree, _ in ran[0]] == ["here", "there"]


def test_a_sweep_file_multiplies():
    found = jobs(["experiment=miniature/sweep", "trainer=cpu"])
    assert len(found) == 2 * 4 * 3
    assert found[0] == ["loss=triplet", "distill=none", "seed=0", "experiment=miniature/sweep", "trainer=cpu"]


def test_origin_of_a_value_in_a_file(tmp_path: Path, monkeypatch):
    """A wrong value inside conf/ is blamed on its file."""
    import shutil

    import noctowl.compose

    copy = tmp_path / "conf"
    shutil.copytree(conf_dir(), copy)
    file = copy / "loss" / "triplet.yaml"
    file.write_text(file.read_text().replace("margin: 0.15", "margin: 7"))
    main = copy / "train.yaml"
    main.write_text(main.read_text().replace("every_n_epochs: 1", "every_n_epochs: -1"))
    monkeypatch.setattr(noctowl.compose, "conf_dir", lambda: copy)
    with pytest.raises(ConfigError) as error:
        compose("train", [])
    assert "loss.margin (conf/loss/triplet.yaml): found 7" in str(error.value)
    assert "selection.every_n_epochs (conf/train.yaml): found -1" in str(error.value)
