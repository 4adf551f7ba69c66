"""Evaluate a run, an exported folder, a hub model or saved predictions on the FG-OVD benchmarks.

    python evaluate.py checkpoint=outputs/default/<run>      the best epoch of a run
    python evaluate.py checkpoint=<exported folder | hub id> data=fgovd data.root=/data/fgovd
    python evaluate.py checkpoint=… benchmark.n_negatives=[1,2,5,10] benchmark.names=[hard]
    python evaluate.py model=owlv2_b16 data=fgovd data.root=/data/fgovd            a pretrained model as it is
    python evaluate.py predictions=outputs/default/<run>     scores saved predictions again, without a model

The results go to outputs/<name>/<time+unique>/results.json; the last line is `results: <path>`.
"""

import sys

try:
    from noctowl.jobs import main
except KeyboardInterrupt:  # libraries take seconds to load
    print("interrupted: nothing was written", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main("evaluate"))
