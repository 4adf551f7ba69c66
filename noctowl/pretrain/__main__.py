"""`python -m noctowl.pretrain` is `noctowl pretrain-tiny`."""

from noctowl.pretrain.stages import main

main()
