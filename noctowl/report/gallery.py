"""Worst and best pictures of a run: truth on the left, prediction on the right."""

import io
from dataclasses import dataclass

from noctowl.assembly import locate
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_benchmarks
from noctowl.errors import NoctowlError
from noctowl.eval.predictions import Predictions
from noctowl.pictures import panel, ranked, samples
from noctowl.report.runs import Run

PREFERRED = ("hard", "medium", "easy", "trivial", "color", "material", "pattern", "transparency")


@dataclass(frozen=True)
class Picture:
    """A JPEG with what it shows, as text."""

    jpeg: bytes
    kind: str  # worst | best | drawn
    benchmark: str
    truth: str
    predicted: str
    correct: bool


def pictures(run: Run, *, count: int = 4, drawn: int = 0) -> tuple[list[Picture], str]:
    """`count` worst and best vocabularies of the run's first benchmark (Hard if it is there), and why there are none.

    And `drawn` ones drawn at random: the same in all runs that detect something for the same vocabularies. Annotations
    and images are looked for where the run's configuration says.
    """
    names = dict.fromkeys(b for b, _ in run.cases)
    name = next((b for b in PREFERRED if b in names), None)
    path = run.folder / "predictions" / f"{name}.npz"
    if name is None or not path.is_file():
        return [], "no predictions are beside the results"
    n = max(n for b, n in run.cases if b == name)
    found = []
    try:
        place = locate(run.config["data"])
        annotations = read_fgovd(find_benchmarks(place["annotations"], [name])[name])
        if run.file_of(name) not in ("", annotations.sha256):
            return [], f"{annotations.path} is not the file that the run was scored on"
        predictions = Predictions.load(path)
        chosen = ranked(annotations, predictions, n_negatives=n, count=count)
        if drawn:
            chosen["drawn"] = samples(annotations, predictions, n_negatives=n, count=drawn, seed=0)
        for kind, members in chosen.items():
            for sample in members:
                file = io.BytesIO()
                panel(sample, place["images"]).save(file, format="JPEG", quality=82)
                said = sample.predicted or "nothing detected"
                found.append(Picture(file.getvalue(), kind, f"{name} N={n}", sample.truth, said, sample.correct))
    except NoctowlError as error:
        return [], f"annotations or images are not where the run had them ({error})"
    return found, "" if found else "no detection is there to be shown"
