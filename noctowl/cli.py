"""`noctowl`: what is not training or evaluation. `noctowl <command> --help` tells the rest.

noctowl check data=fgovd data.root=/data/fgovd      read everything, print one table, exit 1 if anything is fatal
noctowl export outputs/default/<run> --out DIR      a run's selected head as a folder that transformers loads
noctowl features build model=… data=… data.root=…   encode images once, for all runs that follow (verify, info, prune)
noctowl controls --annotations FILE --n-neg 5       text-only rankers on an annotation file
noctowl report RUN...                               figures, controls, comparisons and pictures of runs, as one page
noctowl data synthetic --out DIR                    the miniature's files in the published formats
noctowl pretrain-tiny --out DIR                     the miniature's detector, from nothing
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from noctowl import __version__
from noctowl.errors import NoctowlError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: what the command found, 2 where the user has something to mend, or 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print(f"interrupted: noctowl {arguments.command}", file=sys.stderr)
        return 130
    except NoctowlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="noctowl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"noctowl {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")

    check = commands.add_parser("check", help="read a data root and report what is in it and what is wrong")
    check.add_argument("overrides", nargs="*", help="data=…, data.root=…, data.images=…, data.train_file=…, …")
    check.add_argument("--files", nargs="+", help="annotation files below the annotations folder (default: all)")
    check.add_argument("--no-images", action="store_true", help="annotation files only")
    check.add_argument("--json", action="store_true", help="the report as JSON")
    check.set_defaults(run=_check)

    export = commands.add_parser("export", help="write a run's selected head as a transformers folder")
    export.add_argument("run_folder", type=Path)
    export.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    export.set_defaults(run=_export)

    report = commands.add_parser("report", help="one report.html and report.md of one run or of many")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs")
    report.add_argument("--out", type=Path, help="folder (default: the run's own for one run, ./report for several)")
    report.set_defaults(run=_report)

    _features_parser(commands.add_parser("features", help="the store of image features").add_subparsers(required=True))

    controls = commands.add_parser("controls", help="text-only rankers on an annotation file: no model, no images")
    controls.add_argument("--annotations", type=Path, required=True)
    controls.add_argument(
        "--train-captions", type=Path, nargs="+", default=[], help="files to learn word statistics from"
    )
    controls.add_argument("--n-neg", type=int, required=True, help="negatives of a vocabulary")
    controls.add_argument("--all-captions", action="store_true", help="no 16-token rule")
    controls.add_argument("--seed", type=int, default=0)
    controls.add_argument("--json", action="store_true", help="end with one line of JSON")
    controls.set_defaults(run=_controls)

    data = commands.add_parser("data", help="make data sets")
    kinds = data.add_subparsers(required=True, metavar="kind")
    synthetic = kinds.add_parser("synthetic", help="the miniature's scenes in the published formats")
    synthetic.add_argument("--out", type=Path, required=True)
    for option, default in (("--seed", 0), ("--n-train", 1500), ("--n-val", 250), ("--n-test", 500), ("--size", 96)):
        synthetic.add_argument(option, type=int, default=default)
    synthetic.set_defaults(run=_synthetic)

    text = "pretrain the miniature's detector from nothing"
    pretrain = commands.add_parser("pretrain-tiny", help=text, add_help=False)  # its options are its own
    pretrain.add_argument("arguments", nargs=argparse.REMAINDER)
    pretrain.set_defaults(run=_pretrain)
    return parser


def _features_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    build = kinds.add_parser("build", help="encode what is missing; may run several times at once, and be interrupted")
    build.add_argument("overrides", nargs="*", help="model=…, data=…, features.root=…, features.dtype=…, trainer=…")
    build.set_defaults(run=_features_build)
    for name, text, run in (
        ("verify", "compare every checksum", _features_verify),
        ("info", "what is stored, and the measured error", _features_info),
        ("prune", "remove stores (dry run unless --yes)", _features_prune),
    ):
        parser = kinds.add_parser(name, help=text)
        parser.add_argument("overrides", nargs="*", help="features.root=… (default: the cache)")
        parser.set_defaults(run=run)
        if name == "verify":
            parser.add_argument(
                "--repair", action="store_true", help="take away what is damaged; build encodes it again"
            )
        if name == "prune":
            parser.add_argument("--keep", nargs="*", metavar="KEY", help="beginnings of keys; all other stores go")
            parser.add_argument("--yes", action="store_true", help="remove, do not only list")


def _no_progress_bars() -> None:
    """Of transformers, when it reads and writes weights."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _features_root(arguments: argparse.Namespace) -> Path:
    from noctowl.compose import compose

    return Path(compose("evaluate", arguments.overrides)["features"]["root"]).expanduser()


def _features_build(arguments: argparse.Namespace) -> int:
    from noctowl.assembly import build_features
    from noctowl.compose import compose

    _no_progress_bars()
    print(build_features(compose("train", ["features=disk", *arguments.overrides])))
    return 0


def _features_verify(arguments: argparse.Namespace) -> int:
    from noctowl.store import print_verify, verify

    return print_verify(verify(_features_root(arguments), repair=arguments.repair))


def _features_info(arguments: argparse.Namespace) -> int:
    from noctowl.store import info, print_info

    print_info(info(_features_root(arguments)))
    return 0


def _features_prune(arguments: argparse.Namespace) -> int:
    from noctowl.store import print_prune, prune

    print_prune(prune(_features_root(arguments), arguments.keep, dry_run=not arguments.yes))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from noctowl.assembly import data_root
    from noctowl.check import check_data
    from noctowl.compose import compose

    data = compose("evaluate", arguments.overrides)["data"]
    return check_data(
        data_root(data),
        images=data["images"],
        annotations=data["annotations"],
        files=arguments.files,
        skip_images=arguments.no_images,
        as_json=arguments.json,
        configured={key: data[key.removeprefix("data.")] for key in ("data.train_file", "data.val_file")},
        asked=[word.split("=")[0].lstrip("+") for word in arguments.overrides],
    )


def _export(arguments: argparse.Namespace) -> int:
    from noctowl.assembly import load_checkpoint
    from noctowl.export import export
    from noctowl.runfolder import read_config, read_results

    _no_progress_bars()
    config = read_config(arguments.run_folder)
    provenance = read_results(arguments.run_folder / "results.json")["provenance"]
    export(load_checkpoint(arguments.run_folder, config["model"]), arguments.out, provenance=provenance)
    print(f"exported: {arguments.out}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from noctowl.report import write_report

    print(f"report: {write_report(arguments.runs, arguments.out)}")
    return 0


def _controls(arguments: argparse.Namespace) -> int:
    from noctowl.data.fgovd import TOKEN_LIMIT
    from noctowl.eval.controls import report_controls

    return report_controls(
        arguments.annotations,
        n_negatives=arguments.n_neg,
        train_captions=arguments.train_captions,
        token_limit=None if arguments.all_captions else TOKEN_LIMIT,
        seed=arguments.seed,
        as_json=arguments.json,
    )


def _synthetic(arguments: argparse.Namespace) -> int:
    from noctowl.data.synthetic import write_synthetic

    options = {key: getattr(arguments, key) for key in ("seed", "n_train", "n_val", "n_test", "size")}
    print(f"written: {write_synthetic(arguments.out, **options)}")
    return 0


def _pretrain(arguments: argparse.Namespace) -> int:
    from noctowl.pretrain import main as pretrain_main

    _no_progress_bars()
    pretrain_main(arguments.arguments)
    return 0
