"""Train NoctOWL's class head, evaluate it, export it.

    python train.py                                          the miniature: minutes on a laptop, nothing else needed
    python train.py model=owlv2_l14 data=fgovd data.root=/data/fgovd loss=triplet distill=mse
    python train.py loss=triplet,cross_entropy distill=none,mse -m           a sweep
    python train.py --help                                   every group and key

A run leaves outputs/<name>/<time+unique>/ with config.yaml, metrics.csv, results.json, report.html, predictions/,
checkpoints/ and export/; its last line is `results: <path>`. Exit codes: 2, something in the configuration or the data
has to be mended, and the message says what; 130 after Ctrl-C and 143 after SIGTERM, then resume=<run> continues.
"""

import sys

try:
    from noctowl.jobs import main
except KeyboardInterrupt:  # libraries take seconds to load
    print("interrupted: nothing was written", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main("train"))
