"""Makes a Weights & Biases report that compares the runs of a project: the trade-off, its course, the test figures.

    python bench/wandb_dashboard.py --project noctowl --entity ME

Needs WANDB_API_KEY and `pip install wandb-workspaces`; says so where one is missing. Not tried with a real account.
"""

import argparse
import os
import sys


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", default="noctowl")
    parser.add_argument("--entity", required=True)
    options = parser.parse_args()
    if not os.environ.get("WANDB_API_KEY"):
        print("no WANDB_API_KEY: nothing was made. Create a key at wandb.ai/authorize.", file=sys.stderr)
        return 2
    try:
        import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError:
        print("pip install wandb-workspaces", file=sys.stderr)
        return 2
    steps = "trainer/global_step"
    panels = [
        reports.ScatterPlot(title="trade-off", x="val/map", y="val/lvis_ap"),
        reports.LinePlot(title="validation mAP", x=steps, y=["val/map"]),
        reports.LinePlot(title="coarse validation AP", x=steps, y=["val/lvis_ap"]),
        reports.BarPlot(title="test, Hard", metrics=["test/fgovd/hard/n5/map"]),
        reports.BarPlot(title="test, rare classes", metrics=["test/lvis/ap_rare"]),
    ]
    runs = reports.Runset(entity=options.entity, project=options.project)
    report = reports.Report(
        entity=options.entity,
        project=options.project,
        title="noctowl: fine-grained gain against coarse loss",
        blocks=[reports.PanelGrid(runsets=[runs], panels=panels)],
    )
    report.save()
    print(report.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
